# K 147: leaves a mark in the times of device nodes, which the host and all programs share
# expect: status=ok
# needs: seccomp
import os

from attack import attempt, tell

for name in "null", "zero", "full", "random", "urandom":
    attempt(f"now as the time of {name}", os.utime, f"/dev/{name}")
    attempt(f"another time of {name}", os.utime, f"/dev/{name}", (1, 1))
with open("/dev/null", "r+b", buffering=0) as null:
    attempt("by its descriptor", os.utime, null.fileno())
    null.write(b"x")
tell()
