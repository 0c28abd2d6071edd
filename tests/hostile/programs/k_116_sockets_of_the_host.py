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


def send_from_pair():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        near.sendto(b"x", f"{bait}/datagrams")


attempt("stream", connect)
attempt("half of a pair, connected again", reconnect_pair, socket.SOCK_DGRAM, "datagrams")
attempt("half of a pair of streams, connected again", reconnect_pair, socket.SOCK_STREAM, "stream")
attempt("half of a pair, to another address", send_from_pair)
tell()
