"""Many deadlines, one timer of the loop.

Deadlines are kept in buckets of `TICK_S`, so that adding and removing one costs a set operation: a heap with an entry per
call would keep the entries of calls that were answered long before their deadline.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TICK_S = 0.02

H = TypeVar("H", bound=Hashable)


class Deadlines(Generic[H]):
    """Calls `overdue(item)` once for every item whose time has come, at most `TICK_S` late."""

    def __init__(self, overdue: Callable[[H], None], clock: Callable[[], float]) -> None:
        self._overdue, self._clock = overdue, clock
        self._buckets: dict[int, set[H]] = {}
        self._ticks: list[int] = []  # a heap of the buckets' keys
        self._timer: asyncio.TimerHandle | None = None
        self.rings_at = math.inf  # when the timer rings: nothing is overdue before

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def set(self, item: H, at: float) -> set[H]:
        """Returns the bucket of the item. Discarding the item from its bucket removes the deadline."""
        buckets, ticks = self._buckets, self._ticks
        tick = int(at / TICK_S) + 1  # the end of its bucket: never early
        if tick in buckets:
            bucket = buckets[tick]
            bucket.add(item)
            return bucket
        while ticks and not buckets[ticks[0]]:
            del buckets[heapq.heappop(ticks)]
        bucket = buckets[tick] = {item}
        heapq.heappush(ticks, tick)
        if tick * TICK_S < self.rings_at:
            self._arm()
        return bucket

    def run_due(self) -> None:
        """Report what is overdue now, without waiting for the timer."""
        now_tick = int(self._clock() / TICK_S)
        while self._ticks and self._ticks[0] <= now_tick:
            bucket = self._buckets.pop(heapq.heappop(self._ticks))
            while bucket:  # a report may remove others of the same bucket
                self._overdue(bucket.pop())
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.rings_at = None, math.inf

    def _arm(self) -> None:
        self.close()
        while self._ticks and not self._buckets[self._ticks[0]]:
            del self._buckets[heapq.heappop(self._ticks)]
        if self._ticks:
            self.rings_at = self._ticks[0] * TICK_S
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self.rings_at - self._clock()), self.run_due)
