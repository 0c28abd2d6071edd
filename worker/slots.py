"""The slots of a worker, and a fair queue of cells and calls that wait for one.

The order is the same as in the gateway (`exec_service.dispatch.fair_queue`): priorities share by weight, tenants of a priority
by theirs, and within a tenant the oldest comes first. Cells and calls are equal.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from exec_wire.messages.calls import Priority
from exec_wire.queue.protocol import PRIORITY_WEIGHTS


@dataclass(eq=False, slots=True)
class Claim:
    """A cell or call that waits for a slot. `since`: when it was accepted, on this machine's monotonic clock."""

    tenant: str = ""
    priority: Priority = "train"
    weight: float = 1.0  # of the tenant
    since: float = field(default_factory=time.monotonic)
    is_cell: bool = False
    slot: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WeightedTurns:
    """Chooses names in proportion to their weights. A name that did not take part saves up no turns."""

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._now = 0.0  # the turn of the name that was chosen last

    def take(self, weights: dict[str, float]) -> str:
        self._turns = {name: turn for name, turn in self._turns.items() if turn > self._now}
        name = min(weights, key=lambda name: self._turns.get(name, self._now))
        self._now = self._turns.get(name, self._now)
        self._turns[name] = self._now + 1 / weights[name]
        return name


class FairQueue:
    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.cells = 0
        self._forget()

    def _forget(self) -> None:
        self._priorities = WeightedTurns()
        self._tenants = {name: WeightedTurns() for name in PRIORITY_WEIGHTS}

    def add(self, claim: Claim) -> None:
        self.claims.append(claim)
        self.cells += claim.is_cell

    def remove(self, claim: Claim) -> None:
        self.claims.remove(claim)
        self.cells -= claim.is_cell
        if not self.claims:  # an empty queue forgets past turns
            self._forget()

    def take(self) -> Claim:
        priority = self._priorities.take({claim.priority: PRIORITY_WEIGHTS[claim.priority] for claim in self.claims})
        claims = [claim for claim in self.claims if claim.priority == priority]
        tenant = self._tenants[priority].take({claim.tenant: claim.weight for claim in claims})
        first = min((claim for claim in claims if claim.tenant == tenant), key=lambda claim: claim.since)
        self.remove(first)
        return first


class Slots:
    """Taking and giving back a slot never block; only `next_slot` waits."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))
        self._queue = FairQueue()
        self.on_change: Callable[[], None] = lambda: None  # called when a slot is given back or a cell waits

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def cells_waiting(self) -> int:
        return self._queue.cells

    def take_slot(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        while self._queue.claims:
            claim = self._queue.take()
            if not claim.slot.done():  # else the claim was cancelled
                claim.slot.set_result(slot)
                break
        else:
            self._free.append(slot)
        self.on_change()

    async def next_slot(self, claim: Claim) -> int:
        """Take a free slot, or wait for one until it is this claim's turn."""
        if self._free:
            return self._free.pop()
        self._queue.add(claim)
        if claim.is_cell:
            self.on_change()
        try:
            return await claim.slot
        except asyncio.CancelledError:
            if not claim.slot.cancelled():
                self.give_back(claim.slot.result())
            elif claim in self._queue.claims:
                self._queue.remove(claim)
            raise

    @asynccontextmanager
    async def slot_for_cell(self, claim: Claim, patience_s: float) -> AsyncIterator[None]:
        """Hold a slot while a cell runs; an idle session has none. `TimeoutError` if none becomes free."""
        if patience_s <= 0:  # a free slot would be taken without waiting
            raise TimeoutError
        async with asyncio.timeout(patience_s):
            slot = await self.next_slot(claim)
        try:
            yield
        finally:
            self.give_back(slot)
