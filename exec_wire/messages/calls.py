"""Every message that crosses a process boundary, declared once, in JSON and msgpack.

Evolution: a new field has a default, a type never changes, unknown fields are ignored. Those of a caller are named in the
result (`exec_wire.messages.unknown_fields`).
Not covered here: the job queue's envelopes (`exec_wire.queue.protocol`) and HTTP errors (`exec_wire.problems`).
"""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

# By who is at fault unless the machine caused it (see `verdict`).
ModelStatus = Literal["error", "signal", "timeout", "cpu_limit", "memory_limit", "output_limit", "compile_error"]
InfraStatus = Literal["expired", "worker_lost", "session_lost", "internal_error"]
ClientStatus = Literal["cancelled", "rejected"]
Status = Literal["ok", ModelStatus, InfraStatus, ClientStatus]
Blame = Literal["none", "model", "infra", "client"]
Priority = Literal["train", "eval", "bulk"]
Tier = Literal["S", "A", "B", "C", "D", "E", "none"]

_STATUSES: dict[Blame, tuple[Status, ...]] = {
    "none": ("ok",),
    "model": get_args(ModelStatus),
    "infra": get_args(InfraStatus),
    "client": get_args(ClientStatus),
}
BLAME: dict[Status, Blame] = {status: blame for blame, statuses in _STATUSES.items() for status in statuses}
MAX_STARTS = 3
"""A program is started at most this often for one accepted call; after that `worker_lost` is not retryable."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]
Label = Annotated[str, Meta(max_length=256)]
GivenLabel = Annotated[str, Meta(min_length=1, max_length=256)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
CallIndexes = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 53)]], Meta(max_length=4096)]
CompileArgs = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=32)]


class Limits(Struct, frozen=True, omit_defaults=True):
    """Limits of one program. `memory_mb` does not count the warm interpreter that the program was forked from."""

    wall_s: Seconds = 10.0
    cpu_s: Seconds | None = None  # of one process; see `cpu_limit_s`
    memory_mb: Annotated[int, Meta(ge=16, le=1 << 16)] = 512
    output_kb: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    processes: Annotated[int, Meta(ge=1, le=4096)] = 64
    file_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64

    @property
    def cpu_limit_s(self) -> float:
        """`cpu_s`, or so much more than `wall_s` that an endless loop is a `timeout`."""
        return 2 * self.wall_s + 1 if self.cpu_s is None else self.cpu_s


class Tags(Struct, frozen=True, omit_defaults=True):
    """Where in a training run a call comes from; cancellation and statistics select by these."""

    run: Label = ""
    step: int | None = None
    group: Label = ""
    rollout: Label = ""


class Call(Struct, frozen=True, omit_defaults=True):
    """One program to run."""

    code: str
    id: Label = ""
    language: Annotated[str, Meta(max_length=32)] = "python"
    stdin: str = ""
    files: dict[str, str] = {}  # path -> base64
    fetch_files: list[str] = []
    limits: Limits = Limits()
    env: dict[str, str] = {}
    argv: list[str] = []
    compile_args: CompileArgs = []  # flags for the compiler after its usual ones, such as -std=c++20
    deadline_s: Annotated[float, Meta(gt=0, le=7200)] = 60.0
    tags: Tags = Tags()
    tenant: Label = ""
    priority: Priority = "train"
    require_tier: Literal["", "S", "A", "B", "C", "D", "E"] = ""
    idempotency_key: Label = ""
    echo_value: bool = False


class Batch(Struct, frozen=True):
    """The body of `POST /v1/batch`."""

    calls: list[Call]


class Selection(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The query of `DELETE /v1/calls`: one tenant's calls that match every value given here.

    `request` is the id of the request that brought a call (X-Request-Id), `index` the call's position in that request; several
    positions may be given, none stands for all.
    """

    run: GivenLabel | UnsetType = UNSET
    step: int | UnsetType = UNSET
    group: GivenLabel | UnsetType = UNSET
    rollout: GivenLabel | UnsetType = UNSET
    tenant: Label = ""
    request: RequestId | UnsetType = UNSET
    index: CallIndexes = []

    @property
    def names_a_tag(self) -> bool:
        return not (self.run is self.step is self.group is self.rollout is UNSET)

    @property
    def names_calls(self) -> bool:
        """Whether it says enough to cancel by: a tag or a request; `index` means nothing without its request."""
        return self.request is not UNSET or (self.names_a_tag and not self.index)

    def picks(self, tags: Tags, tenant: str) -> bool:
        """By tenant and tags; the gateway compares `request` and `index`."""
        return (
            tenant == self.tenant
            and (self.run is UNSET or self.run == tags.run)
            and (self.step is UNSET or self.step == tags.step)
            and (self.group is UNSET or self.group == tags.group)
            and (self.rollout is UNSET or self.rollout == tags.rollout)
        )


class Cancelled(Struct, frozen=True):
    """The answer of `DELETE /v1/calls`."""

    cancelled: int


class Usage(Struct, frozen=True):
    """Measured by the kernel, not reported by the program. `wall_s`: what elapsed, less the time it was starved of a CPU."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_peak_bytes: int = 0
    processes_peak: int = 0
    elapsed_s: float = 0.0


class Timings(Struct):
    """Where the time went: waiting for a slot, setting up the sandbox, running, and all of it as the gateway saw it."""

    queue_ms: float = 0.0
    start_ms: float = 0.0
    run_ms: float = 0.0
    total_ms: float = 0.0


class Sandbox(Struct, frozen=True):
    """The isolation that was really there when the program ran."""

    tier: Tier = "none"
    layers: list[str] = []
    profile: str = ""  # the warm interpreter that the program was forked from


class Display(Struct, frozen=True):
    """What a cell showed besides text: the same thing in several media types, base64 of what is not text."""

    data: dict[str, str] = {}


class Result(Struct):
    """What became of one call, or of one cell of a session."""

    status: Status
    blame: Blame = "none"
    retryable: bool = False
    id: str = ""
    index: int = 0
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False  # stdout or stderr lost its middle; the cut is marked in the text
    value: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # path -> base64
    usage: Usage = Usage()
    timings: Timings = field(default_factory=Timings)
    completed: bool = False
    sandbox: Sandbox = Sandbox()
    worker: str = ""
    error: str = ""  # one line on what went wrong with us or the call; empty for what the program did
    request_id: str = ""
    traceparent: str = ""
    display: list[Display] = field(default_factory=list)  # of a cell: pictures, tables
    state_kept: bool | None = None  # of a cell: are the session's variables still there?
    warnings: list[str] = field(default_factory=list)  # unknown fields of the request, such as a misspelt field
    files_missing: dict[str, str] = field(default_factory=dict)  # of `fetch_files`, what is not in `files` -> why

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def tool_text(self, max_chars: int = 4000) -> str:
        """What the model should read: its output, then a line that explains an abnormal end."""
        body = self.stdout
        if self.stderr:
            body = f"{body.rstrip(chr(10))}\n{self.stderr}" if body else self.stderr
        if self.value is not None and self.value != "None":
            body = f"{body.rstrip(chr(10))}\n{self.value}" if body else self.value
        note = _explain(self)
        lost = "[the session's variables are lost]" if self.state_kept is False else ""
        text = "\n".join(part for part in (body.rstrip("\n"), note, lost) if part)
        return cut_middle(text or "(no output)", max_chars)


_NOTES = {
    "ok": "",
    "error": "[exit code {0.exit_code}]",
    "signal": "[killed by signal {0.signal}]",
    "timeout": "[timed out after {0.usage.wall_s:.1f} s]",
    "cpu_limit": "[stopped: CPU time limit reached after {0.usage.cpu_s:.1f} s]",
    "memory_limit": "[stopped: memory limit reached]",
    "output_limit": "[stopped: too much output]",
    "compile_error": "[the program does not compile]",
}


def _explain(result: Result) -> str:
    if result.blame == "infra":
        return f"[the tool failed: {result.status}; this is not the program's fault]"
    if result.stderr and result.status in ("error", "compile_error"):
        return ""
    if result.status in _NOTES:
        return _NOTES[result.status].format(result)
    return f"[{result.status}{': ' + result.error if result.error else ''}]"


def cut_middle(text: str, most: int) -> str:
    """`text` in at most `most` characters: head and tail kept, the cut marked."""
    if len(text) <= most:
        return text
    mark = f"\n[... {len(text)} characters cut ...]\n"  # as long as the mark can get
    keep = most - len(mark)
    if keep <= 0:
        return text[:most]
    mark = f"\n[... {len(text) - keep} characters cut ...]\n"
    head = keep - keep // 2
    return text[:head] + mark + text[len(text) - keep // 2 :]


def verdict(status: Status, *, infra: bool = False, starts: int = 1, **fields: object) -> Result:
    """A Result whose blame and retryability follow from its status.

    `infra`: the machine caused it (a time-out spent waiting for a CPU, a kill that was not ours).
    `starts`: how often the program was started; a call that lost `MAX_STARTS` workers is not offered again.
    """
    blame: Blame = "infra" if infra else BLAME[status]
    retryable = blame == "infra" and status != "session_lost" and not (status == "worker_lost" and starts >= MAX_STARTS)
    return Result(status=status, blame=blame, retryable=retryable, **fields)  # type: ignore[arg-type]


encode_json = msgspec.json.Encoder().encode
decode_result = msgspec.json.Decoder(Result).decode
pack = msgspec.msgpack.Encoder().encode
unpack_call = msgspec.msgpack.Decoder(Call).decode
unpack_result = msgspec.msgpack.Decoder(Result).decode
