"""The records of what is inside: a `Flight` is one run of a program, a `Waiter` is one caller's claim on its result.

Usually one waiter per flight; more when callers join a running call by its idempotency key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from exec_wire.messages.calls import Tags

if TYPE_CHECKING:
    from exec_service.dispatch.requests import Order


class Key(NamedTuple):
    """An idempotency key, which belongs to its tenant."""

    tenant: str
    key: str


# Identity, not contents, makes two records the same: eq=False keeps the cheap default hash.
@dataclass(eq=False, slots=True)
class Flight:
    id: str  # of the gateway's own making
    payload: bytes  # kept until the answer: only the gateway that accepted a call can publish it again
    needs: str  # the class of workers that can run it
    key: Key | None = None
    priority: str = "train"
    tenant: str = ""
    publications: int = 0  # each may have started the program once
    released: bool = False
    cancelled: bool = False  # on request; its last waiter stays until the worker has killed it
    waiters: list[Waiter] = field(default_factory=list)

    @property
    def deadline_at(self) -> float:
        return max(waiter.deadline_at for waiter in self.waiters)


@dataclass(eq=False, slots=True)
class Waiter:
    order: Order
    index: int  # in its request
    label: str  # the caller's own id, echoed
    accepted_at: float
    deadline_at: float
    bytes: int  # what admission has charged for it
    tags: Tags  # cancellation selects by these; workers never see them
    tenant: str
    flight: Flight | None = None  # None once it has its result
    in_grace: bool = False
