"""The structs of native/protocol.h, and the messages between worker and runner.

Worker and zygote: fixed integers plus descriptors over SOCK_SEQPACKET. Worker and runner: JSON, some with descriptors.
"""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from exec_wire import Tier
from worker.sandbox.memory import Memory

REQUEST_SLOT, REQUEST_RUN, REQUEST_KILL, REQUEST_PING = 1, 2, 3, 4
REQUEST_MEMBER, REQUEST_INTERRUPT, REQUEST_END_MEMBER, REQUEST_USAGE, REQUEST_PROCESSES = 5, 6, 7, 8, 9
REPORT_READY, REPORT_ENDED, REPORT_PONG, REPORT_MEMBER, REPORT_MEMBER_ENDED, REPORT_USAGE = 1, 2, 3, 4, 5, 6
HAS_STDIN, HAS_FOLDER_SOCKET, HAS_BINARY, HAS_CONTROL = 1, 2, 4, 8
HAS_HELLO, HAS_LEAF, LEAF_BY_PIDS, LEAF_JOINED = 1, 2, 4, 8
LEAF_FDS = 4
USAGE_BEGIN = 1
BY_ITSELF, BY_WALL, BY_OUTPUT, BY_REQUEST, BY_MEMORY, BY_DEADLINE = 0, 1, 2, 3, 4, 5
OOM_BY_UNKNOWN, OOM_BY_LIMIT, OOM_BY_MACHINE = 0, 1, 2


class ZygoteRequest(NamedTuple):
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


class ZygoteReport(NamedTuple):
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


class Ready(Struct):
    """What a runner found: its answer to `configure`."""

    tier: Tier = "none"
    layers: list[str] = []
    missing: dict[str, str] = {}  # layer -> why
    steps: list[str] = []
    languages: dict[str, str] = {}  # those that are installed, and their commands
    memory: Memory = Memory(1 << 62, "")  # of where programs run


_REQUEST = struct.Struct(f"{len(ZygoteRequest._fields)}q")
_REPORT = struct.Struct(f"{len(ZygoteReport._fields)}q")
REPORT_BYTES = _REPORT.size
MESSAGE_FDS = 16  # maximum per message between worker and runner


def send_request(zygote: socket.socket, request: ZygoteRequest, fds: Sequence[int] = ()) -> None:
    if fds:
        socket.send_fds(zygote, [_REQUEST.pack(*request)], fds)
    else:
        zygote.send(_REQUEST.pack(*request))


def read_report(data: bytes) -> ZygoteReport:
    return ZygoteReport(*_REPORT.unpack(data))


def slot_request(index: int, uid: int, files: Sequence[int | None]) -> tuple[ZygoteRequest, list[int]]:
    """The request that registers a slot with a zygote: its uid and the control group files that exist."""
    present = sum(1 << i for i, fd in enumerate(files) if fd is not None)
    return ZygoteRequest(REQUEST_SLOT, index, wall_ns=uid, cpu_s=present), [fd for fd in files if fd is not None]


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
