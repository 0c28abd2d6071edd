"""Bulk jobs as they travel: the items of `POST /v1/jobs`, one per line; their results; what is said of a job."""

from typing import Literal

import msgspec
from msgspec import Struct, field

from exec_wire.messages.calls import Call, Result
from exec_wire.messages.judging import Judge, Judgement, Verification, Verify

JobState = Literal["running", "paused", "cancelled", "done"]
ENDED: frozenset[JobState] = frozenset({"cancelled", "done"})


class JobItem(Struct, frozen=True, omit_defaults=True):
    """A line of a job's input: exactly one of these."""

    call: Call | None = None
    judge: Judge | None = None
    verify: Verify | None = None


class JobError(Struct, frozen=True, omit_defaults=True):
    """Why an item has no result."""

    code: str
    detail: str = ""
    field: str = ""


class JobResult(Struct, frozen=True, omit_defaults=True):
    """A line of a job's results: the position of its item in the input, counted from 0, and what became of it."""

    item: int
    call: Result | None = None
    judge: Judgement | None = None
    verify: Verification | None = None
    error: JobError | None = None


class JobStatus(Struct, frozen=True):
    """What `GET /v1/jobs/{id}` says."""

    id: str
    state: JobState
    items: int
    done: int  # items that have their result, some of which can be fetched only when their chunk is finished
    chunks: int
    chunks_done: int
    created: str  # when, in UTC
    items_per_s: float | None = None  # of the last minute; None while nothing is known
    eta_s: float | None = None
    outcomes: dict[str, int] = field(default_factory=dict)  # items of finished chunks by status, verdict or error
    trouble: str = ""  # why no chunk makes progress, as the last blocked one reported
    name: str = ""
    warnings: list[str] = field(default_factory=list)  # of `POST /v1/jobs`: the first unknown fields of its items


class JobList(Struct, frozen=True):
    """The answer of `GET /v1/jobs`: the tenant's jobs, the newest first."""

    jobs: list[JobStatus]


class JobRemoved(Struct, frozen=True):
    """The answer of `DELETE /v1/jobs/{id}`."""

    removed: str


decode_item = msgspec.json.Decoder(JobItem).decode
decode_job_result = msgspec.json.Decoder(JobResult).decode
