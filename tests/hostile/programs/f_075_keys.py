# F 75: keys in the kernel's keyrings, which belong to a uid and not to a namespace
# expect: status=ok
# needs: seccomp x86_64
from attack import attempt, syscall, tell

for ring in -1, -2, -3, -4, -5:
    attempt(f"add_key {ring}", syscall, 248, b"user", b"seventy-five", b"x", 1, ring)
    attempt(f"keyctl {ring}", syscall, 250, 0, ring, 1)
attempt("request_key", syscall, 249, b"user", b"seventy-five", None, 0)
tell()
