"""The slots of a worker, and who gets the next one while all are in use: cells of its sessions and calls that it has taken.

The order is that of the gateway (`exec_service.dispatch.fair_queue`): priorities share by weight, within each the tenants by
theirs, within each the one that was accepted first. Cells have no other right than calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from exec_wire.messages.calls import Priority
from exec_wire.queue.protocol import PRIORITY_WEIGHTS


@dataclass(eq=False, slots=True)
class Claim:
    """Somebody who wants a slot. `since`: when it was accepted, on this machine's monotonic clock."""

    tenant: str = ""
    priority: Priority = "train"
    weight: float = 1.0  # of the tenant
    since: float = field(default_factory=time.monotonic)
    is_cell: bool = False
    slot: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """Whose turn it is, each as often as its weight says. Whoever wanted nothing saves up no turns."""

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._now = 0.0  # the turn of the one that was served last

    def take(self, weights: dict[str, float]) -> str:
        self._turns = {name: turn for name, turn in self._turns.items() if turn > self._now}
        name = min(weights, key=lambda name: self._turns.get(name, self._now))
        self._now = self._turns.get(name, self._now)
        self._turns[name] = self._now + 1 / weights[name]
        return name


class Line:
    """Claims in a fair order."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []
        self.cells = 0
        self._forget()

    def _forget(self) -> None:
        self._priorities = Turns()
        self._tenants = {name: Turns() for name in PRIORITY_WEIGHTS}

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._claims

    def add(self, claim: Claim) -> None:
        self._claims.append(claim)
        self.cells += claim.is_cell

    def remove(self, claim: Claim) -> None:
        self._claims.remove(claim)
        self.cells -= claim.is_cell
        if not self._claims:  # nobody waits, so nobody has had too much
            self._forget()

    def take(self) -> Claim:
        priority = self._priorities.take({claim.priority: PRIORITY_WEIGHTS[claim.priority] for claim in self._claims})
        claims = [claim for claim in self._claims if claim.priority == priority]
        tenant = self._tenants[priority].take({claim.tenant: claim.weight for claim in claims})
        first = min((claim for claim in claims if claim.tenant == tenant), key=lambda claim: claim.since)
        self.remove(first)
        return first


class Slots:
    """Taking and giving back a slot are plain state changes; only waiting for one is awaited."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))
        self._line = Line()
        self.when_changed: Callable[[], None] = lambda: None  # told of a slot that was given back, and of a cell that waits

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def cells_waiting(self) -> int:
        return self._line.cells

    def take_slot(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        while self._line:
            claim = self._line.take()
            if not claim.slot.done():  # else it was just given up
                claim.slot.set_result(slot)
                break
        else:
            self._free.append(slot)
        self.when_changed()

    async def next_slot(self, claim: Claim) -> int:
        """One that is free, or one that becomes so when it is this claim's turn."""
        if self._free:
            return self._free.pop()
        self._line.add(claim)
        if claim.is_cell:
            self.when_changed()
        try:
            return await claim.slot
        except asyncio.CancelledError:
            if not claim.slot.cancelled():
                self.give_back(claim.slot.result())
            elif claim in self._line:
                self._line.remove(claim)
            raise

    @asynccontextmanager
    async def slot_for_cell(self, claim: Claim, patience_s: float) -> AsyncIterator[None]:
        """A slot while a cell runs; a session that waits for its next one has none. `TimeoutError` if none becomes free."""
        if patience_s <= 0:  # a slot that is free would be had all the same
            raise TimeoutError
        async with asyncio.timeout(patience_s):
            slot = await self.next_slot(claim)
        try:
            yield
        finally:
            self.give_back(slot)
