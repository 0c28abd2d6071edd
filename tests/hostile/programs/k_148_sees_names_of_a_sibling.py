# K 148: learns what a sibling does from the names of its sockets
# expect: status=ok
# pair: k_148_holds_names.py
import socket
import time

from attack import escaped, tell


def names():
    try:
        with open("/proc/self/net/unix") as file:
            return [line.split()[-1] for line in file.read().splitlines()[1:]]
    except OSError:
        return []


def take(kind, name):
    try:
        with socket.socket(socket.AF_UNIX, kind) as own:
            own.bind(name)
    except OSError as error:
        if error.errno == 98:  # EADDRINUSE
            escaped(f"{name[1:]} is taken")


for _ in range(20):
    if seen := names():
        escaped(f"sees {seen}")
    take(socket.SOCK_STREAM, "\0name-142")
    take(socket.SOCK_DGRAM, "\0name-142-datagrams")
    time.sleep(0.03)
tell()
