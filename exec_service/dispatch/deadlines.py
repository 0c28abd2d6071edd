"""Many deadlines, one timer of the loop.

Deadlines are kept in buckets of `TICK_S`, so that adding and removing one costs a set operation: a heap with an entry per
call would keep the entries of calls that were answered long before their deadline.
"""

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TICK_S = 0.02

H = TypeVar("H", bound=Hashable)


class Deadlines(Generic[H]):
    """Calls `overdue(item)` once for every item whose time has come, at most `TICK_S` late."""

    def __init__(self, overdue: Callable[[H], None], clock: Callable[[], float]) -> None:
        self._overdue, self._clock = overdue, clock
        self._buckets: dict[int, set[H]] = {}
        self._tick_of: dict[H, int] = {}
        self._ticks: list[int] = []  # a heap of the buckets' keys
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    def __len__(self) -> int:
        return len(self._tick_of)

    def set(self, item: H, at: float) -> None:
        self.remove(item)
        tick = int(at / TICK_S) + 1  # the end of its bucket: never early
        if tick not in self._buckets:
            self._buckets[tick] = set()
            heapq.heappush(self._ticks, tick)
        self._buckets[tick].add(item)
        self._tick_of[item] = tick
        self._arm()

    def remove(self, item: H) -> None:
        tick = self._tick_of.pop(item, None)
        if tick is not None and tick in self._buckets:  # not there while `run_due` reports this bucket
            self._buckets[tick].discard(item)

    def run_due(self) -> None:
        """Report what is overdue now, without waiting for the timer."""
        now_tick = int(self._clock() / TICK_S)
        while self._ticks and self._ticks[0] <= now_tick:
            for item in self._buckets.pop(heapq.heappop(self._ticks)):
                # A report may have removed others of the same bucket.
                if self._tick_of.get(item, now_tick + 1) <= now_tick:
                    del self._tick_of[item]
                    self._overdue(item)
        self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        while self._ticks and not self._buckets[self._ticks[0]]:
            del self._buckets[heapq.heappop(self._ticks)]
        if not self._ticks or (self._timer is not None and self._timer_tick <= self._ticks[0]):
            return
        self.close()
        self._timer_tick = self._ticks[0]
        delay_s = max(0.0, self._timer_tick * TICK_S - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.run_due()
