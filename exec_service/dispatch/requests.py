"""The calls that came in one HTTP or gRPC request, and their results on the way back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec import Struct

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.tickets import Ticket
from exec_service.telemetry.metrics import Metrics
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Call, Result

# Between two visits of a reader who waits for more: to write and read each result by itself costs 5 % of a short call.
PACE_S = 0.01
_by_index = attrgetter("index")


class Origin(Struct, frozen=True):
    """Where a request came from; goes into its results and logs."""

    request_id: str = ""
    traceparent: str = ""
    adapter: str = ""  # the adapter for another service's clients, if it came through one (`exec_service.compat`)
    account: Account | None = None  # of the caller's key; None where no keys are required
    warnings: dict[int, list[str]] = {}  # unknown fields of the request's calls, by the index of the call

    def tenant_of(self, call: Call) -> str:
        return self.account.tenant if self.account is not None else call.tenant


ANONYMOUS = Origin()


@dataclass(eq=False, slots=True)
class CallRequest:
    """One accepted request. Results arrive here; one reader takes all that are there."""

    origin: Origin
    admission: Admission
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    expecting: bool = False  # more calls may join, until `expect_no_more`
    calls: int = 0  # charged to admission
    bytes: int = 0  # charged to admission
    pending: set[Ticket] = field(default_factory=set)
    closed: bool = False
    arrived: list[Result] = field(default_factory=list)
    arrived_bytes: int = 0
    taken: tuple[int, int] = (0, 0)  # calls and bytes that the reader of `take` is writing out
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # results can be taken, or the caller is gone
    _due_at: float = 0.0  # when the reader may come again, if something is pending then
    _bell: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """The caller is gone: its reader takes nothing more."""
        self.closed = True
        self.changed.set()

    def deliver(self, ticket: Ticket, result: Result, bytes_: int, stay_ms: float = 0.0) -> None:
        """Stamp the result as this caller's own, count it and hand it over."""
        origin = self.origin
        result.id, result.index = ticket.label, ticket.index
        result.request_id, result.traceparent = origin.request_id, origin.traceparent
        if origin.warnings:
            result.warnings = origin.warnings.pop(ticket.index, [])
        total_ms = (self.clock() - ticket.accepted_at) * 1000
        result.timings.total_ms = round(total_ms, 3)
        result.timings.queue_ms = round(max(0.0, total_ms - stay_ms), 3)
        self.admission.bytes += bytes_ - ticket.bytes  # from now on it is the result that takes room
        self.bytes += bytes_ - ticket.bytes
        ticket.bytes = bytes_
        self.metrics.finished(result, origin.adapter, ticket.tenant, ticket.tags)
        ticket.due.discard(ticket)
        self.pending.discard(ticket)
        self.arrived.append(result)
        self.arrived_bytes += bytes_
        if self.pending:
            self.wake_reader()
        else:
            self.changed.set()

    def wake_reader(self) -> None:
        """At once, or a moment after its last visit; then with all that arrived since."""
        if self._is_due():
            self.changed.set()
        elif self._bell is None:
            self._bell = asyncio.get_running_loop().call_at(self._due_at, self._ring)

    def _is_due(self) -> bool:
        return not self.pending or asyncio.get_running_loop().time() >= self._due_at

    def _ring(self) -> None:
        self._bell = None
        self._due_at = 0.0  # whatever the clock says
        self.changed.set()

    async def take(self) -> list[Result]:
        """Wait for results and take all that have arrived; an empty list when there will be no more.

        Results that were taken before count as delivered: the reader comes again when it has written them.
        """
        if self.taken[0]:
            calls, bytes_ = self.taken
            self.calls -= calls
            self.bytes -= bytes_
            self.admission.give_back(calls, bytes_)
            if self.origin.account is not None:
                self.origin.account.give_back(calls)
            self.taken = (0, 0)
        while not (self.arrived and self._is_due()) and (self.pending or self.expecting) and not self.closed:
            if self.arrived:
                self.wake_reader()  # it is not due yet, and nobody else may ring
            await self.changed.wait()
            self.changed.clear()
        if self.closed:
            return []
        self._due_at = asyncio.get_running_loop().time() + PACE_S
        taken, self.arrived = self.arrived, []
        self.taken, self.arrived_bytes = (len(taken), self.arrived_bytes), 0
        return taken

    def expect_no_more(self) -> None:
        self.expecting = False
        self.changed.set()

    async def take_all(self, check: Callable[[], None] = lambda: None) -> list[Result]:
        """Wait until every result has arrived, then take them in the order of the calls. `check` may raise while some wait
        for others."""
        while self.pending and not self.closed:
            await self.changed.wait()
            self.changed.clear()
            if self.pending:
                check()
        return sorted(self.arrived, key=_by_index)
