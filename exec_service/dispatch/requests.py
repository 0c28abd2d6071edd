"""The calls that came in one HTTP or gRPC request, and their results on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec import Struct

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.tickets import Ticket
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
    """One accepted request. Results arrive here; one reader takes all that are there.

    Use as a context manager: leaving it cancels whatever is pending.
    """

    origin: Origin
    end: Callable[[CallRequest], None]  # cancels what is pending and gives back the rest
    admission: Admission
    expecting: bool = False  # more calls may join, until `expect_no_more`
    pending: set[Ticket] = field(default_factory=set)
    closed: bool = False
    arrived: list[Result] = field(default_factory=list)
    arrived_bytes: int = 0
    taken: tuple[int, int] = (0, 0)  # calls and bytes that the reader of `take` is writing out
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _due_at: float = 0.0  # when the reader may come again, if something is pending then
    _bell: asyncio.TimerHandle | None = None

    def __enter__(self) -> CallRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self)

    def close(self) -> None:
        """The caller has everything or is gone."""
        self.end(self)

    def deliver(self, ticket: Ticket, result: Result) -> None:
        self.pending.discard(ticket)
        self.arrived.append(result)
        self.arrived_bytes += ticket.bytes
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
        self.give_back(*self.taken)
        self.taken = (0, 0)
        while not (self.arrived and self._is_due()) and (self.pending or self.expecting) and not self.closed:
            if self.arrived:
                self.wake_reader()  # it is not due yet, and nobody else may ring
            await self.changed.wait()
            self.changed.clear()
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

    def give_back(self, calls: int, bytes_: int) -> None:
        """Admission has room for these again."""
        if calls:
            self.admission.give_back(calls, bytes_)
            if self.origin.account is not None:
                self.origin.account.give_back(calls)
