# G 95: types into a terminal that somebody may have left open
# expect: status=ok
import fcntl

from attack import attempt, tell

for fd in 0, 1, 2:
    for request in 0x5412, 0x541C, 0x540E:  # TIOCSTI, TIOCLINUX, TIOCSCTTY
        attempt(f"{hex(request)} on {fd}", fcntl.ioctl, fd, request, b"\x0bx")
for path in "/dev/tty", "/dev/console", "/dev/ptmx", "/dev/pts/0":
    attempt(path, open, path, "r+b")
tell()
