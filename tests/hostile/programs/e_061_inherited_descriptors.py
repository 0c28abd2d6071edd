# E 61: writes to every descriptor there could be
# expect: status=ok
# expect-cell: status=signal signal=9 blame=model
import os

from attack import attempt, tell

for fd in range(3, 4096):
    attempt(f"write to {fd}", os.write, fd, b"forged")
    attempt(f"look at {fd}", os.fstat, fd)
tell()
