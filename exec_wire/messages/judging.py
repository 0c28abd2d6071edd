"""The messages of `POST /v1/judge` (one program, many tests, a verdict on each) and `POST /v1/verify` (is an answer right?)."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from exec_wire.messages.calls import Blame, CompileArgs, Label, Limits, Priority, Result, Status, Tags, Timings

VerdictName = Literal["AC", "WA", "TLE", "MLE", "RE", "OLE", "CE", "SKIPPED", "INFRA"]
"""accepted · wrong answer · time, memory limit · run-time error · output limit · does not compile · not looked at · not judged,
for a reason that is not the program's."""

Tolerance = Annotated[float, Meta(ge=0)]
LanguageName = Annotated[str, Meta(max_length=32)]


class Test(Struct, frozen=True, omit_defaults=True):
    """What the program gets and what it has to answer. `expected` never enters its sandbox."""

    stdin: str = ""  # of a function: its arguments, as a JSON list or object
    expected: str = ""  # of a function: the value to be returned, as JSON
    argv: list[str] = []
    limits: Limits | None = None  # instead of those of the judgement
    id: Label = ""


class Checker(Struct, frozen=True, omit_defaults=True):
    """How an output is compared with what was expected."""

    kind: Literal["exact", "tokens", "lines", "float", "program"] = "tokens"
    abs_tol: Tolerance = 1e-6
    rel_tol: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    code: str = ""  # of `program`: exit code 0 accepts, 1 refuses
    language: LanguageName = "python"


class Judge(Struct, frozen=True, omit_defaults=True):
    """The body of `POST /v1/judge`."""

    code: str
    tests: Annotated[list[Test], Meta(min_length=1)]
    id: Label = ""
    language: LanguageName = "python"
    function: Annotated[str, Meta(max_length=256)] = ""  # to be called with the arguments of each test; Python only
    checker: Checker = Checker()
    stop_on_fail: bool = False
    limits: Limits = Limits()
    compile_args: CompileArgs = []
    deadline_s: Annotated[float, Meta(gt=0, le=7200)] = 60.0  # for all of it
    output_chars: Annotated[int, Meta(ge=0, le=1 << 20)] = 1000  # of each stdout and stderr in the answer
    tags: Tags = Tags()
    tenant: Label = ""
    priority: Priority = "train"
    require_tier: Literal["", "S", "A", "B", "C", "D", "E"] = ""


class Verdict(Struct):
    """On one test. `message` does not quote what was expected."""

    index: int
    verdict: VerdictName
    id: str = ""
    message: str = ""
    retryable: bool = False  # INFRA only: it was our fault, and another attempt may help
    result: Result | None = None  # of the program's run, its streams cut; None if it was not run


class Judgement(Struct):
    """On the program. There is no score if a test could not be judged: what we did wrong is never scored."""

    verdict: VerdictName  # INFRA if a test could not be judged, SKIPPED if it was cancelled, else the first failure, else AC
    score: float | None  # passed ÷ total
    passed: int
    total: int
    tests: list[Verdict]
    id: str = ""
    retryable: bool = False  # so are all of its tests that are INFRA
    compile_error: str = ""
    total_ms: float = 0.0
    request_id: str = ""
    warnings: list[str] = field(default_factory=list)  # unknown fields of the request, such as a misspelt field


class Verify(Struct, frozen=True, omit_defaults=True):
    """One answer. The truth is taken as it is; of the answer only what `extract` finds counts."""

    answer: Annotated[str, Meta(max_length=1 << 20)]
    truth: Annotated[str, Meta(max_length=1 << 16)]
    id: Label = ""
    kind: Literal["math", "exact", "numeric", "multiple_choice"] = "math"
    extract: Literal["auto", "boxed", "answer", "none"] = "auto"
    wall_s: Annotated[float, Meta(gt=0, le=60)] = 5.0  # of `math`; the others take none
    abs_tol: Tolerance | None = None  # of `numeric`; neither given: 1e-6, and whole numbers exactly
    rel_tol: Annotated[float, Meta(ge=0, le=1)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=7200)] = 60.0
    tags: Tags = Tags()
    tenant: Label = ""
    priority: Priority = "train"


class VerifyBatch(Struct, frozen=True):
    """Many of them; each is answered as it lands."""

    items: list[Verify]


class Verification(Struct):
    """`equal` is null if it could not be found out for a reason that is not the model's (see `blame`)."""

    equal: bool | None
    status: Status = "ok"
    blame: Blame = "none"
    retryable: bool = False
    id: str = ""
    index: int = 0
    extracted: str | None = None  # what was compared, cut to 1,000 characters; null if nothing was found
    error: str = ""
    timings: Timings = field(default_factory=Timings)
    request_id: str = ""
    warnings: list[str] = field(default_factory=list)  # unknown fields of the request, such as a misspelt field


decode_verification = msgspec.json.Decoder(Verification).decode
