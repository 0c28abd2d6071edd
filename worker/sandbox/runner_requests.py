"""The messages of a worker to its runner, and their checks. The runner is root and does not trust the worker.

Every message is one JSON object with one field of a known name, type and range. Anything else is a `BadRequest`, which ends the
connection. The runner itself checks what depends on its state (how many slots there are).
"""

import socket
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from worker.sandbox.runner_options import UIDS

MESSAGE_BYTES = 1 << 16
MAX_PROFILES, MAX_MODULES, MAX_LEAVES = 64, 256, 4096

Profile = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Module = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")]
Modules = Annotated[list[Module], Meta(max_length=MAX_MODULES)]
Index = Annotated[int, Meta(ge=0, le=UIDS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Leaf = Annotated[int, Meta(ge=0, lt=MAX_LEAVES)]


class BadRequest(Exception):
    """The worker sent a message that is not allowed. The text says why and is safe to log."""


class Configure(Struct, frozen=True, forbid_unknown_fields=True):
    slots: Annotated[int, Meta(ge=1, le=UIDS)]
    profiles: Annotated[dict[Profile, Modules], Meta(max_length=MAX_PROFILES)]
    sessions: Annotated[int, Meta(ge=0, le=UIDS)] = 0
    min_tier: Literal["A", "B", "C", "D", "E"] = "E"  # in addition to the runner's own


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one field is present."""

    configure: Configure | None = None
    recycle: Number | None = None
    retire: Number | None = None
    session_slot: Index | None = None
    leaf: tuple[Index, Leaf] | None = None


_decoder = msgspec.json.Decoder(Request)


def receive(worker: socket.socket) -> Request | None:
    """The worker's next message; None when the worker is gone. The kernel closes descriptors that come with it."""
    try:
        data, _, flags, _ = worker.recvmsg(MESSAGE_BYTES)
    except ConnectionResetError:
        return None
    if flags & socket.MSG_TRUNC:
        raise BadRequest(f"a message of more than {MESSAGE_BYTES} bytes")
    return parse(data) if data else None


def parse(data: bytes) -> Request:
    try:
        request = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(str(error)[:200].encode("ascii", "backslashreplace").decode()) from None
    if sum(getattr(request, name) is not None for name in Request.__struct_fields__) != 1:
        raise BadRequest("a message has to have exactly one field")
    return request
