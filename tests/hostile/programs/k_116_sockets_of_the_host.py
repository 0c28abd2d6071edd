# K 116: reaches sockets of the host that have a name in its file system
# expect: status=ok
# bait
import os
import socket

from attack import attempt, tell

bait = os.environ["BAIT"]


def connect():
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"{bait}/stream")


def reconnect_pair(kind, name):
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    with near, far:
        near.connect(f"{bait}/{name}")
        near.send(b"x")


def send_from_pair(kind):
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    with near, far:
        near.sendto(b"x", f"{bait}/datagrams")
        far.setblocking(False)
        if far.recv(1):  # the kernel ignored the address
            raise OSError


def reconnect_widow(kind):
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    far.close()
    with near:
        near.connect(f"{bait}/stream")


attempt("stream", connect)
attempt("half of a pair, connected again", reconnect_pair, socket.SOCK_DGRAM, "datagrams")
for kind in socket.SOCK_STREAM, socket.SOCK_SEQPACKET:
    attempt(f"half of a pair of {kind.name}, connected again", reconnect_pair, kind, "stream")
    attempt(f"what is left of a pair of {kind.name}, connected again", reconnect_widow, kind)
for kind in socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_RDM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET:
    attempt(f"half of a pair of {kind.name}, to another address", send_from_pair, kind)
tell()
