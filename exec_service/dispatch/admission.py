"""Admission: limits calls and bytes in the gateway. It admits all calls of a request or none.

A call is charged from its acceptance until its result was handed to the caller's connection, so that callers who read
slowly use up admission rather than memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from exec_service.refusals import Overloaded

if TYPE_CHECKING:
    from exec_service.tenants.accounts import Account

RATE_WINDOW_S = 10


class InFlight:
    """Calls and bytes that are charged now, and how many were given back per second over the last `RATE_WINDOW_S`."""

    def __init__(self, clock: Callable[[], float], max_bytes: float = math.inf) -> None:
        self.calls = 0
        self.bytes = 0
        self.max_bytes = max_bytes
        self.on_room: Callable[[], object] = lambda: None  # called when `bytes` are no more than `max_bytes` again
        self._clock = clock
        self._since = clock()
        self._seconds = [[0, 0, 0] for _ in range(RATE_WINDOW_S + 1)]  # a ring of [whole second, calls, bytes]

    def charge(self, calls: int, bytes_: int = 0) -> None:
        self.calls += calls
        self.bytes += bytes_

    def give_back(self, calls: int, bytes_: int = 0) -> None:
        """These were completed."""
        was_full = self.bytes > self.max_bytes
        self.calls -= calls
        self.bytes -= bytes_
        second = int(self._clock())
        counts = self._seconds[second % len(self._seconds)]
        if counts[0] != second:
            counts[:] = second, 0, 0
        counts[1] += calls
        counts[2] += bytes_
        if was_full and self.bytes <= self.max_bytes:
            self.on_room()

    def per_s(self) -> tuple[float, float]:
        now = self._clock()
        recent = [counts for counts in self._seconds if counts[0] >= now - RATE_WINDOW_S]
        span_s = min(RATE_WINDOW_S, max(1.0, now - self._since))
        return sum(counts[1] for counts in recent) / span_s, sum(counts[2] for counts in recent) / span_s


class Admission(InFlight):
    """`max_arriving`: how many of the bytes unfinished bodies may take; all if not given."""

    def __init__(
        self,
        max_calls: int,
        max_bytes: int,
        retry_after_max_s: float,
        clock: Callable[[], float],
        max_arriving: int | None = None,
    ) -> None:
        super().__init__(clock, max_bytes)
        self.max_calls = max_calls
        self.max_arriving = max_bytes if max_arriving is None else max_arriving
        self.arriving = 0  # of these bytes
        self._retry_after_max_s = retry_after_max_s

    def check(self, calls: int, bytes_: int = 0) -> None:
        """Raise `Overloaded` if this does not fit now."""
        over_calls = self.calls + calls - self.max_calls
        over_bytes = self.bytes + bytes_ - self.max_bytes
        if over_calls <= 0 and over_bytes <= 0:
            return
        raise Overloaded(
            f"{self.calls} of {self.max_calls} calls and {self.bytes} of {self.max_bytes} bytes are in use; "
            f"{calls} more do not fit",
            self._retry_after_s(over_calls, over_bytes),
        )

    def _retry_after_s(self, over_calls: float, over_bytes: float) -> float:
        """The time until the excess is gone at the rate of the last seconds; the longest wait if nothing completes."""
        calls_per_s, bytes_per_s = self.per_s()
        waits = [1.0]
        for over, per_s in ((over_calls, calls_per_s), (over_bytes, bytes_per_s)):
            if over > 0:
                waits.append(over / per_s if per_s > 0 else self._retry_after_max_s)
        return round(min(self._retry_after_max_s, max(waits)), 1)


class ArrivingBody:
    """A body that arrives, charged part by part. Use as a context manager: calls of it that are accepted are charged again."""

    __slots__ = ("_admission", "_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission, self._bytes = admission, 0

    def __enter__(self) -> ArrivingBody:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bytes:
            self._charge(-self._bytes)

    def hold(self, bytes_: int) -> None:
        """Charge the bytes that have arrived; raise `Overloaded` if they do not fit."""
        admission, more = self._admission, bytes_ - self._bytes
        if more > 0:
            admission.check(0, more)
            if admission.arriving + more > admission.max_arriving:
                words = f"unfinished bodies have {admission.arriving} of {admission.max_arriving} bytes; {more} more do not fit"
                raise Overloaded(words, 1.0)
        self._charge(more)

    def _charge(self, bytes_: int) -> None:
        self._bytes += bytes_
        self._admission.arriving += bytes_
        self._admission.charge(0, bytes_)


class Reservation:
    """Admitted in one go for calls that are handed over one by one. Use as a context manager."""

    def __init__(
        self, admission: Admission, account: Account | None, calls: int, bytes_: int, closed: Callable[[Reservation], None]
    ) -> None:
        admission.check(calls, bytes_)
        if account is not None:
            account.check(calls)
            account.take_up(calls)
        admission.charge(calls, bytes_)
        self._admission, self._account, self._calls, self._bytes, self._closed = admission, account, calls, bytes_, closed

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.use(self._calls, self._bytes)
        self._closed(self)

    def use(self, calls: int, bytes_: int) -> None:
        """These are charged on their own from now on. More than was reserved, as for a second attempt, is tolerated."""
        calls, bytes_ = min(calls, self._calls), min(bytes_, self._bytes)
        self._calls -= calls
        self._bytes -= bytes_
        self._admission.charge(-calls, -bytes_)
        if self._account is not None:
            self._account.charge(-calls)
