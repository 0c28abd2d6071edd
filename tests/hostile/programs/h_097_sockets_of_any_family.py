# H 97: sockets of every family there is
# expect: status=ok
# needs: seccomp x86_64
import errno

from attack import attempt, buffer, syscall, tell

for family in range(2, 50):
    for kind in 1, 2, 3, 5:
        attempt(f"socket {family} {kind}", syscall, 41, family, kind, 0, by=[errno.EAFNOSUPPORT])
        attempt(f"pair {family} {kind}", syscall, 53, family, kind, 0, buffer(8), by=[errno.EAFNOSUPPORT])
attempt("high bits", syscall, 41, 1 << 32 | 2, 1, 0)
tell()
