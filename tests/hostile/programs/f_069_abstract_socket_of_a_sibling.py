# F 69: connects to the abstract socket of a sibling
# expect: status=ok
# pair: f_069_abstract_listener.py
import socket
import time

from attack import attempt, tell


def connect():
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect("\0meet-69")


def write():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        pair[0].sendto(b"x", "\0meet-69-datagrams")
    finally:
        pair[0].close()
        pair[1].close()


for _ in range(20):
    attempt("connected", connect)
    attempt("wrote", write)
    time.sleep(0.03)
tell()
