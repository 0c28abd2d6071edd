"""What a worker can have of its runner, which is root and does not trust it: limits on the command line, checked messages.

The operator sets the limits. A worker that starts its own runner passes its settings as these arguments; a worker that joins a
runner on a socket can only ask for less.

Every message is one JSON object with one field of a known name, type and range. Anything else is a `BadRequest`, which ends the
connection. The runner itself checks what depends on its state (how many slots there are).
"""

import argparse
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta, Struct

from exec_wire import Tier
from worker.sandbox.tiers import ALL_LAYERS
from worker.sandbox.uids import BLOCK_SIZE, DEFAULT_BASE, MAX_BASE, MIN_UID

UIDS = BLOCK_SIZE - 1  # for slots and sessions; the first uid of a block is the jail's root
MESSAGE_BYTES = 1 << 16
OLDER_LANDLOCK = "landlock="  # in `mask_layers`, with an ABI: as if the kernel had no newer one
NEWEST_LANDLOCK_ABI = 1000
MAX_PROFILES, MAX_MODULES, MAX_LEAVES = 64, 256, 4096

Profile = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
Module = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*\Z")]
Modules = Annotated[list[Module], Meta(max_length=MAX_MODULES)]
Index = Annotated[int, Meta(ge=0, le=UIDS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Leaf = Annotated[int, Meta(ge=0, lt=MAX_LEAVES)]


@dataclass(frozen=True)
class RunnerOptions:
    packages: Path
    uid_base: int = DEFAULT_BASE
    min_tier: Tier = "B"
    max_slots: int = UIDS
    max_sessions: int = UIDS
    mask_layers: tuple[str, ...] = ()
    fault_injection: bool = False

    @property
    def masked_layers(self) -> list[str]:
        return [layer for layer in self.mask_layers if not layer.startswith(OLDER_LANDLOCK)]

    @property
    def landlock_abi(self) -> int:
        """The newest ABI of Landlock that is used."""
        older = [int(layer.removeprefix(OLDER_LANDLOCK)) for layer in self.mask_layers if layer.startswith(OLDER_LANDLOCK)]
        return min(older, default=NEWEST_LANDLOCK_ABI)

    def arguments(self) -> list[str]:
        """The command line that `read` turns into these options."""
        arguments = ["--packages", str(self.packages), "--uid-base", str(self.uid_base), "--min-tier", self.min_tier]
        arguments += ["--max-slots", str(self.max_slots), "--max-sessions", str(self.max_sessions)]
        arguments += ["--mask-layers", ",".join(self.mask_layers)] if self.mask_layers else []
        return [*arguments, *(["--fault-injection"] if self.fault_injection else [])]

    @classmethod
    def read(cls, options: argparse.Namespace) -> Self:
        return cls(**{name: getattr(options, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser, packages: Path | None = None) -> None:
    """`packages`: the default folder; without one the argument is required."""
    parser.add_argument(
        "--packages", type=Path, default=packages, required=packages is None, metavar="DIR",
        help="folder of the packages that programs may import",
    )  # fmt: skip
    parser.add_argument(
        "--uid-base", type=_number(MIN_UID, MAX_BASE), default=RunnerOptions.uid_base, metavar="UID",
        help=f"as root: first of the user ids that sandboxes run under, at least {MIN_UID}; a runner takes the first block "
        f"of {BLOCK_SIZE} from here on that has no user, no subordinate id and no process (default {DEFAULT_BASE})",
    )  # fmt: skip
    parser.add_argument(
        "--min-tier", choices="ABCDE", default=RunnerOptions.min_tier,
        help="start no interpreter in a weaker sandbox than this; a worker can only require a stronger one (default B)",
    )  # fmt: skip
    parser.add_argument(
        "--max-slots", type=_number(1, UIDS), default=RunnerOptions.max_slots, metavar="N",
        help=f"maximum number of concurrent programs that a worker may ask for (default {UIDS})",
    )  # fmt: skip
    parser.add_argument(
        "--max-sessions", type=_number(0, UIDS), default=RunnerOptions.max_sessions, metavar="N",
        help=f"maximum number of sessions that a worker may ask for; with its slots at most {UIDS} (default {UIDS})",
    )  # fmt: skip
    parser.add_argument(
        "--mask-layers", type=_layers, default=(), metavar="LAYER,…",
        help=f"for tests: act as if these layers of the sandbox did not work ({', '.join(ALL_LAYERS)}); "
        "landlock=2: as if Landlock had ABI 2",
    )  # fmt: skip
    parser.add_argument("--fault-injection", action="store_true", help="for tests: a call may name a set-up step that fails")


def _number(least: int, most: int):  # type: ignore[no-untyped-def]
    def number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return int(text)

    return number


def _layers(text: str) -> tuple[str, ...]:
    layers = tuple(filter(None, text.split(",")))
    if unknown := {layer for layer in layers if layer not in ALL_LAYERS and not re.fullmatch(OLDER_LANDLOCK + "[1-9]", layer)}:
        raise argparse.ArgumentTypeError(f"unknown layers: {', '.join(sorted(unknown))}")
    return layers


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
