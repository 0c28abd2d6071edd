# K 126: looks for the sockets of the runner, the worker and other zygotes, and talks to what it finds
# expect: status=ok
import os
import socket

from attack import attempt, escaped, syscall, tell

PIDFD_OPEN, PIDFD_GETFD = 434, 438
KINDS = socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM
HELLO = b'{"configure": {"slots": 1, "uid_base": 100000, "mask_layers": ["uid"], "faults": true, "profiles": {}}}'


def greet(name, kind):
    with socket.socket(socket.AF_UNIX, kind) as caller:
        caller.connect(name)
        caller.send(HELLO)


def abstract_names():
    try:
        with open("/proc/net/unix", "rb") as file:
            return {b"\0" + line.split()[7][1:] for line in file if line.split()[7:] and line.split()[7].startswith(b"@")}
    except OSError:
        return set()


def take_descriptor(pid, number):
    """Of another process: whoever has the runner's or a zygote's socket can ask for anything that they do."""
    process = syscall(PIDFD_OPEN, pid, 0)
    taken = syscall(PIDFD_GETFD, process, number, 0)
    socket.socket(fileno=taken).send(HELLO)


def open_descriptor(pid, number):
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    os.write(fd, HELLO)


names = {"/run/exec-runner/runner.sock", "/run/exec-service/runner.sock", "/tmp/runner.sock", "\0exec-service", "\0runner"}
for name in names | abstract_names():
    for kind in KINDS:
        attempt(f"{name!r} by {kind.name}", greet, name, kind)
for folder in "/run/exec-runner", "/run/exec-service":
    try:
        escaped(f"{folder} has {os.listdir(folder)}")
    except OSError:
        pass
others = {os.getppid(), *range(1, 64)} - {0, os.getpid()}
for pid in others:
    for number in range(3, 16):
        attempt(f"descriptor {number} of process {pid}", take_descriptor, pid, number)
        attempt(f"/proc/{pid}/fd/{number}", open_descriptor, pid, number)
tell()
