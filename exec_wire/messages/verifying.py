"""The messages of `POST /v1/verify`: is a model's answer equal to the truth?"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from exec_wire.messages.calls import Blame, Label, Priority, Status, Tags, Timings

Text = Annotated[str, Meta(max_length=1 << 20)]


class Verify(Struct, frozen=True, omit_defaults=True):
    """One answer. The truth is taken as it is; of the answer only what `extract` finds counts."""

    answer: Text
    truth: Annotated[str, Meta(max_length=1 << 16)]
    id: Label = ""
    kind: Literal["math", "exact", "numeric", "multiple_choice"] = "math"
    extract: Literal["auto", "boxed", "answer", "none"] = "auto"
    wall_s: Annotated[float, Meta(gt=0, le=60)] = 5.0  # of `math`; the others take none
    abs_tol: Annotated[float, Meta(ge=0)] | None = None  # of `numeric`; neither given: 1e-6, and whole numbers exactly
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


decode_verify_batch = msgspec.json.Decoder(VerifyBatch).decode
decode_verification = msgspec.json.Decoder(Verification).decode
