"""Sessions as they cross a process boundary: what a caller sends and gets, and how a gateway asks the worker that has one.

A session's id names its worker and that worker's life, so that every gateway finds it and nobody has to remember it; what makes
it unguessable is its last part.
"""

import base64
import binascii
import secrets
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field

from exec_wire.messages.calls import Label, Limits, Priority, Result, Seconds, Selection, Tags

MAX_FORKS = 64
SessionState = Literal["idle", "running", "ended"]


class SessionSpec(Struct, frozen=True, omit_defaults=True):
    """The body of `POST /v1/sessions`. `limits.wall_s` holds for each cell, `limits.memory_mb` for the session and its forks
    together, as do `processes` and `file_mb`; `cpu_s` does not hold for cells."""

    profile: Label = ""  # which warm interpreter; the smallest if not given
    limits: Limits = Limits(memory_mb=1024, file_mb=256)
    ttl_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0  # without a request for so long, it is ended
    tags: Tags = Tags()
    tenant: Label = ""
    auto_checkpoint: bool = False
    env: dict[str, str] = {}
    files: dict[str, str] = {}  # path -> base64
    priority: Priority = "train"  # of its cells and those of its forks


class Cell(Struct, frozen=True, omit_defaults=True):
    """The body of `POST /v1/sessions/{id}/run`."""

    code: str
    id: Label = ""
    stdin: str = ""
    wall_s: Seconds | None = None  # the session's own if not given
    deadline_s: Annotated[float, Meta(gt=0, le=7200)] = 60.0
    idempotency_key: Label = ""
    tenant: Label = ""


class Fork(Struct, frozen=True, omit_defaults=True):
    """The body of `POST /v1/sessions/{id}/fork`."""

    n: Annotated[int, Meta(ge=1, le=MAX_FORKS)] = 1
    tags: Tags | None = None  # the parent's if not given
    tenant: Label = ""


class Tenant(Struct, frozen=True, omit_defaults=True):
    """The body of the requests that need none: whose session it is."""

    tenant: Label = ""


class Files(Struct, frozen=True, omit_defaults=True):
    """The body of `PUT /v1/sessions/{id}/files`, and the answer to `GET`: path -> base64."""

    files: dict[str, str] = {}
    tenant: Label = ""
    warnings: list[str] = []  # of an answer: unknown fields of the request
    files_missing: dict[str, str] = {}  # in an answer: path -> why it is not among the files


class Fetch(Struct, frozen=True, omit_defaults=True):
    """The query of `GET /v1/sessions/{id}/files`."""

    paths: list[str] = []
    tenant: Label = ""


class SessionInfo(Struct, frozen=True):
    """What `GET /v1/sessions/{id}` says."""

    id: str
    state: SessionState = "idle"
    parent: str = ""  # the session that it was forked from
    profile: str = ""
    cells: int = 0  # that were run in it
    checkpoint: bool = False  # can it be rolled back?
    idle_s: float = 0.0
    ttl_s: float = 0.0
    memory_bytes: int = 0  # of the session and all its forks
    tags: Tags = Tags()
    worker: str = ""
    error: str = ""  # how it ended, if it has
    files_restored: bool | None = None  # after a rollback
    warnings: list[str] = []  # unknown fields of the request


class SessionList(Struct, frozen=True):
    """The answer of `POST /v1/sessions/{id}/fork` and `GET /v1/sessions`."""

    sessions: list[SessionInfo]
    warnings: list[str] = []  # unknown fields of the request


class Interrupted(Struct, frozen=True):
    """The answer of `POST /v1/sessions/{id}/interrupt`: was a cell running?"""

    interrupted: bool
    warnings: list[str] = []  # unknown fields of the request


class Ended(Struct, frozen=True):
    """The answer of `DELETE /v1/sessions/{id}`."""

    ended: bool = True
    warnings: list[str] = []  # unknown fields of the request


# -- between a gateway and a worker -----------------------------------------------------------------------------------------


class Create(Struct, frozen=True, tag=True):
    spec: SessionSpec


class RunCell(Struct, frozen=True, tag=True):
    session: str
    cell: Cell
    weight: Annotated[float, Meta(gt=0)] = 1.0  # of the tenant


class ForkSession(Struct, frozen=True, tag=True):
    session: str
    fork: Fork


class RollBack(Struct, frozen=True, tag=True):
    session: str
    tenant: str


class Interrupt(Struct, frozen=True, tag=True):
    session: str
    tenant: str


class PutFiles(Struct, frozen=True, tag=True):
    session: str
    files: dict[str, str]
    tenant: str


class FetchFiles(Struct, frozen=True, tag=True):
    session: str
    paths: list[str]
    tenant: str


class Look(Struct, frozen=True, tag=True):
    session: str
    tenant: str


class End(Struct, frozen=True, tag=True):
    session: str
    tenant: str


class ListSessions(Struct, frozen=True, tag=True):
    selection: Selection


Order = Create | RunCell | ForkSession | RollBack | Interrupt | PutFiles | FetchFiles | Look | End | ListSessions
"""What a gateway can ask of one worker; the payload of a directed job."""


class Refused(Struct, frozen=True, tag=True):
    """The worker does not do it; `code` is one of `exec_wire.problems`."""

    code: str
    detail: str = ""
    field: str = ""
    retry_after_s: float | None = None


class Ran(Struct, frozen=True, tag=True):
    result: Result
    tags: Tags = Tags()  # of the session


class Told(Struct, frozen=True, tag=True):
    """One session, or several."""

    sessions: list[SessionInfo] = field(default_factory=list)


class Got(Struct, frozen=True, tag=True):
    files: dict[str, str]
    files_missing: dict[str, str] = {}


class Did(Struct, frozen=True, tag=True):
    done: bool


Reply = Refused | Ran | Told | Got | Did

pack_sessions = msgspec.msgpack.Encoder().encode
unpack_order = msgspec.msgpack.Decoder(Order).decode
unpack_reply = msgspec.msgpack.Decoder(Reply).decode


class SessionId(NamedTuple):
    worker: str
    life: str  # of the worker: a new one after each start
    secret: str


def new_session_id(worker: str, life: str) -> str:
    return f"{base64.urlsafe_b64encode(worker.encode()).decode().rstrip('=')}.{life}.{secrets.token_urlsafe(18)}"


def read_session_id(text: str) -> SessionId | None:
    """None if it is no such id."""
    parts = text.split(".")
    if len(parts) != 3 or len(text) > 512:
        return None
    try:
        worker = base64.urlsafe_b64decode(parts[0] + "=" * (-len(parts[0]) % 4)).decode()
    except (binascii.Error, ValueError):
        return None
    return SessionId(worker, parts[1], parts[2])
