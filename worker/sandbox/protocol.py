"""The structs of native/protocol.h, and the runner's few messages to its worker.

Worker and zygote: fixed integers plus descriptors over SOCK_SEQPACKET. Worker and runner: JSON, some with a descriptor.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

ASK_SLOT, ASK_RUN, ASK_KILL, ASK_PING = 1, 2, 3, 4
ASK_MEMBER, ASK_INTERRUPT, ASK_END_MEMBER, ASK_USAGE, ASK_PROCESSES = 5, 6, 7, 8, 9
SAY_READY, SAY_ENDED, SAY_PONG, SAY_MEMBER, SAY_MEMBER_ENDED, SAY_USAGE = 1, 2, 3, 4, 5, 6
HAS_STDIN, HAS_FOLDER_SOCKET, HAS_BINARY, HAS_CONTROL = 1, 2, 4, 8
HAS_HELLO, HAS_LEAF, LEAF_BY_PIDS, LEAF_JOINED = 1, 2, 4, 8
LEAF_FDS = 4
USAGE_BEGIN = 1
BY_ITSELF, BY_WALL, BY_OUTPUT, BY_REQUEST, BY_MEMORY, BY_DEADLINE = 0, 1, 2, 3, 4, 5
OOM_BY_UNKNOWN, OOM_BY_LIMIT, OOM_BY_MACHINE = 0, 1, 2


class Ask(NamedTuple):
    kind: int
    slot: int = 0
    call: int = 0
    wall_ns: int = 0
    deadline_ns: int = 0
    cpu_s: int = 0
    memory_bytes: int = 0
    file_bytes: int = 0
    folder_bytes: int = 0
    output_bytes: int = 0
    processes: int = 0
    open_files: int = 0
    flags: int = 0
    fail_step: int = 0
    member: int = 0


class Say(NamedTuple):
    kind: int
    slot: int
    call: int
    step: int
    error: int
    status: int
    ended_by: int
    start_ns: int
    run_ns: int
    cpu_ns: int
    memory_peak: int
    oom_kills: int
    processes_peak: int
    starved_ns: int
    oom_by: int


_ASK = struct.Struct(f"{len(Ask._fields)}q")
_SAY = struct.Struct(f"{len(Say._fields)}q")
SAY_BYTES = _SAY.size
MESSAGE_FDS = 16  # of a message between worker and runner, at most


def send_ask(link: socket.socket, ask: Ask, fds: Sequence[int] = ()) -> None:
    if fds:
        socket.send_fds(link, [_ASK.pack(*ask)], fds)
    else:
        link.send(_ASK.pack(*ask))


def read_say(data: bytes) -> Say:
    return Say(*_SAY.unpack(data))


def slot_ask(index: int, uid: int, files: Sequence[int | None]) -> tuple[Ask, list[int]]:
    """How a zygote learns of a slot: its uid and the control group files that exist."""
    present = sum(1 << i for i, fd in enumerate(files) if fd is not None)
    return Ask(ASK_SLOT, index, wall_ns=uid, cpu_s=present), [fd for fd in files if fd is not None]


def send_message(link: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    socket.send_fds(link, [json.dumps(message).encode()], fds)


def receive_message(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; None when the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(link, 1 << 16, MESSAGE_FDS)
    except ConnectionResetError:
        return None
    if not data:
        return None
    return json.loads(data), fds
