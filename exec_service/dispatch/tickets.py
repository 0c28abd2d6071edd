"""The records of accepted calls: a `Ticket` is one caller's claim on one result, a `PendingJob` one run at the workers.

Usually a job has one ticket. It has more when callers send the same idempotency key while the job runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from exec_wire.messages.calls import Tags

if TYPE_CHECKING:
    from exec_service.dispatch.requests import CallRequest


class Key(NamedTuple):
    """An idempotency key, which belongs to its tenant."""

    tenant: str
    key: str


class JobState(Enum):
    """`exec_service.dispatch.call_table` has the transitions."""

    WAITING = "waiting"  # in this gateway, for credit
    RELEASED = "released"  # with the queue or a worker
    CANCELLING = "cancelling"  # as RELEASED; its last ticket stays until the worker has killed the program
    DONE = "done"


# Identity, not contents, makes two records the same: eq=False keeps the cheap default hash.
@dataclass(eq=False, slots=True)
class PendingJob:
    id: str  # made by the gateway
    payload: bytes  # kept until the answer: only the gateway that accepted a call can publish it again
    needs: str  # the class of workers that can run it
    key: Key | None = None
    priority: str = "train"
    tenant: str = ""
    publications: int = 0  # each may have started the program once
    state: JobState = JobState.WAITING
    tickets: list[Ticket] = field(default_factory=list)

    @property
    def cancelling(self) -> bool:
        return self.state is JobState.CANCELLING

    @property
    def deadline_at(self) -> float:
        return max(ticket.deadline_at for ticket in self.tickets)


@dataclass(eq=False, slots=True)
class Ticket:
    request: CallRequest
    index: int  # in its request
    label: str  # the caller's own id, echoed
    accepted_at: float
    deadline_at: float
    bytes: int  # what admission has charged for it
    tags: Tags  # cancellation selects by these; workers never see them
    tenant: str
    job: PendingJob | None = None  # None once it has its result
    due: set[Ticket] = field(default_factory=set)  # the tickets of `Deadlines` that are due at the same time; it is one of them
    in_grace: bool = False  # its deadline has passed; the worker's answer may still come
