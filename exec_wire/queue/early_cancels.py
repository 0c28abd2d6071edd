"""Cancels that arrive before what they cancel.

A cancel and its call travel on different connections, so either may arrive first: at a gateway, whose request is still being
read, and at a worker, which has been handed a job and has not started it. Both keep the cancel and apply it to the call when
that arrives. They keep it for `KEEP_S` and keep at most `MOST` of them, the newest.
"""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

KEEP_S = 30.0
MOST = 65_536


class EarlyCancels(Generic[K]):
    def __init__(self, clock: Callable[[], float] = time.monotonic, keep_s: float = KEEP_S, most: int = MOST) -> None:
        self._clock, self._keep_s, self._most = clock, keep_s, most
        self._until: dict[K, float] = {}  # the oldest first, which is also the first to expire

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, key: K) -> bool:
        return self._until.get(key, float("-inf")) > self._clock()

    def add(self, key: K) -> None:
        self._until.pop(key, None)
        now = self._clock()
        self._until[key] = now + self._keep_s
        while (oldest := next(iter(self._until))) != key and (len(self._until) > self._most or self._until[oldest] <= now):
            del self._until[oldest]

    def take(self, key: K) -> bool:
        """Whether it is there; it is not any more."""
        found = key in self
        self._until.pop(key, None)
        return found
