"""The slots of a worker, and a fair queue of cells and calls that wait for one.

The order is the same as in the gateway (`exec_service.dispatch.fair_queue`): priorities share by weight, tenants of a priority
by theirs, and within a tenant the oldest comes first. Cells and calls are equal.

The worker holds jobs that have no slot yet as long as they start soon: `Slots.to_hold` says how many.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from exec_wire.messages.calls import Priority
from exec_wire.queue.protocol import PRIORITY_WEIGHTS

# A held job should start within this time: longer than a way to the queue and back, so that no slot waits for a job, and short
# beside what a call takes, so that another worker that becomes idle meanwhile would start it hardly earlier.
HOLD_WITHIN_S = 0.01
NEWEST_SHARE = 0.1  # of the newest slot time in their mean


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

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots, self._clock = slots, clock
        self._free = list(range(slots))
        self._queue = FairQueue()
        self._taken_at = [0.0] * slots
        self._slot_s = math.inf  # the mean time that a slot was taken for, weighted exponentially; not known yet
        self._given_back_at = -math.inf
        self.on_change: Callable[[], None] = lambda: None  # called when a slot is given back or a cell waits

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def cells_waiting(self) -> int:
        return self._queue.cells

    @property
    def to_hold(self) -> int:
        """How many jobs beyond the free slots would start within `HOLD_WITHIN_S`, at most one per slot. None while no slot has
        become free for longer than that: programs are longer than they were."""
        between_s = self._slot_s / self.slots
        if not self._free:
            between_s = max(between_s, self._clock() - self._given_back_at)
        return min(self.slots, int(HOLD_WITHIN_S / max(between_s, 1e-6)))

    def take_slot(self) -> int:
        slot = self._free.pop()
        self._taken_at[slot] = self._clock()
        return slot

    def give_back(self, slot: int) -> None:
        self._given_back_at = now = self._clock()
        used_s = now - self._taken_at[slot]
        self._slot_s = used_s if self._slot_s == math.inf else self._slot_s + NEWEST_SHARE * (used_s - self._slot_s)
        while self._queue.claims:
            claim = self._queue.take()
            if not claim.slot.done():  # else the claim was cancelled
                self._taken_at[slot] = now
                claim.slot.set_result(slot)
                break
        else:
            self._free.append(slot)
        self.on_change()

    async def next_slot(self, claim: Claim) -> int:
        """Take a free slot, or wait for one until it is this claim's turn."""
        if self._free:
            return self.take_slot()
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
