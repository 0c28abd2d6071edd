"""The live workers and the other gateways, as the queue knows them: read about once a second by one task, never per request."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from typing import NoReturn

from exec_service.tenants.keys import Keys
from exec_wire.queue.protocol import NO_USE, TIERS, GatewayQueue, QueueUnavailable, WorkerInfo


def strength(tier: str) -> int:
    """Larger is stronger; a tier that nobody has heard of is worth nothing."""
    return len(TIERS) - TIERS.index(tier) if tier in TIERS else 0


class WorkerRegistry:
    def __init__(self, queue: GatewayQueue, refresh_s: float, release_factor: float, keys: Keys | None = None) -> None:
        self._queue, self._refresh_s, self._release_factor, self._keys = queue, refresh_s, release_factor, keys
        self.workers: list[WorkerInfo] = []
        self.slots = 0  # of all of them
        self.sharing = 1  # this gateway and the others that have calls waiting
        # How many calls may be released and unanswered, in all and of each class: a little more than the slots, so that no slot
        # waits for us, and what the workers would hold. Gateways with calls waiting share them equally.
        self.window = 0
        self.window_for: dict[str, int] = {}
        self.languages = ["python"]  # what some worker has; while none is alive, what the last ones had

    @property
    def alive(self) -> bool:
        """Some worker can take calls."""
        return self.slots > 0

    @property
    def best_tier(self) -> str:
        return max((worker.tier for worker in self.workers), key=strength, default="none")

    @property
    def tier(self) -> str:
        """What every call gets at least: the weakest of the workers."""
        return min((worker.tier for worker in self.workers), key=strength, default="none")

    @property
    def layers(self) -> list[str]:
        """The layers that all workers have, in the order the first one names them."""
        if not self.workers:
            return []
        return [layer for layer in self.workers[0].layers if all(layer in worker.layers for worker in self.workers)]

    @property
    def profiles(self) -> list[str]:
        return sorted({profile for worker in self.workers for profile in worker.profiles})

    def layer_everywhere(self) -> dict[str, bool]:
        """Every layer that a worker has or misses: do all have it?"""
        known = {layer for worker in self.workers for layer in (*worker.layers, *worker.missing_layers)}
        return {layer: all(layer in worker.layers for worker in self.workers) for layer in sorted(known)}

    def has(self, worker: str) -> bool:
        return any(worker == known.id for known in self.workers)

    async def refresh(self, backlog: bool = False) -> None:
        others = await self._queue.announce(backlog, self._keys.use() if self._keys is not None else NO_USE)
        self.sharing = 1 + sum(other.backlog for other in others)
        if self._keys is not None:
            self._keys.learn(others)
        self.workers = await self._queue.workers()
        self.slots = sum(worker.slots for worker in self.workers)
        if self.workers:
            self.languages = sorted({language for worker in self.workers for language in worker.needs})
        most, most_for = 0.0, defaultdict[str, float](float)
        for worker in self.workers:
            # A worker holds at most one job per slot, whatever it says.
            room = self._release_factor * worker.slots + min(worker.holds, worker.slots)
            most += room
            for needs in worker.classes:
                most_for[needs] += room
        self.window = self._share(most)
        self.window_for = {needs: self._share(room) for needs, room in most_for.items()}

    def _share(self, room: float) -> int:
        return max(1, math.ceil(room / self.sharing)) if room else 0

    async def refresh_forever(self, has_backlog: Callable[[], bool], changed: Callable[[], None]) -> NoReturn:
        while True:
            try:
                await self.refresh(has_backlog())
                changed()
            except QueueUnavailable:
                pass  # whoever has something to send says so; the last list is kept
            await asyncio.sleep(self._refresh_s)
