"""The calls that came in one HTTP or gRPC request, and their results on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from exec_service.dispatch.tickets import Ticket
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Call, Result

# Between two visits of a reader who waits for more: to write and read each result by itself costs 5 % of a short call.
PACE_S = 0.01


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


class CallRequest:
    """One accepted request. Results arrive here; one reader takes all that are there.

    Use as a context manager: leaving it cancels whatever is pending.
    """

    def __init__(
        self,
        origin: Origin,
        close: Callable[[CallRequest], None],
        give_back: Callable[[int, int], None],
        *,
        expecting: bool = False,
    ) -> None:
        self.origin = origin
        self.expecting = expecting  # more calls may join, until `expect_no_more`
        self.pending: set[Ticket] = set()
        self.closed = False
        self._close, self._give_back_shared = close, give_back
        self._arrived: list[Result] = []
        self._arrived_bytes = 0
        self._taken = (0, 0)  # calls and bytes that the reader is writing out
        self._changed = asyncio.Event()
        self._due_at = 0.0  # when the reader may come again, if something is pending then
        self._bell: asyncio.TimerHandle | None = None

    def __enter__(self) -> CallRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deliver(self, ticket: Ticket, result: Result) -> None:
        self.pending.discard(ticket)
        self._arrived.append(result)
        self._arrived_bytes += ticket.bytes
        if not self.pending:
            self._changed.set()
        else:
            self._wake_reader()

    def _wake_reader(self) -> None:
        """At once, or a moment after its last visit; then with all that arrived since."""
        if self._is_due():
            self._changed.set()
        elif self._bell is None:
            self._bell = asyncio.get_running_loop().call_at(self._due_at, self._ring)

    def _is_due(self) -> bool:
        return not self.pending or asyncio.get_running_loop().time() >= self._due_at

    def _ring(self) -> None:
        self._bell = None
        self._due_at = 0.0  # whatever the clock says
        self._changed.set()

    async def take(self) -> list[Result]:
        """Wait for results and take all that have arrived; an empty list when there will be no more.

        What was taken before counts as delivered now: the reader comes again when it has written it.
        """
        self._settle()
        while not (self._arrived and self._is_due()) and (self.pending or self.expecting) and not self.closed:
            if self._arrived:
                self._wake_reader()  # it is not due yet, and nobody else may ring
            await self._changed.wait()
            self._changed.clear()
        self._due_at = asyncio.get_running_loop().time() + PACE_S
        return self._take_arrived()

    def expect_no_more(self) -> None:
        self.expecting = False
        self._changed.set()

    async def take_all(self, check: Callable[[], None] = lambda: None) -> list[Result]:
        """Wait until every result has arrived, then take them in the order of the calls. `check` may raise while some wait
        for others."""
        while self.pending and not self.closed:
            await self._changed.wait()
            self._changed.clear()
            if self.pending:
                check()
        return sorted(self._take_arrived(), key=lambda result: result.index)

    def close(self) -> None:
        """The caller has everything or is gone."""
        if self.closed:
            return
        self.closed = True
        self._close(self)
        self._take_arrived()
        self._settle()
        self._changed.set()

    def _take_arrived(self) -> list[Result]:
        taken, self._arrived = self._arrived, []
        calls, bytes_ = self._taken
        self._taken = (calls + len(taken), bytes_ + self._arrived_bytes)
        self._arrived_bytes = 0
        return taken

    def give_back(self, calls: int, bytes_: int) -> None:
        """Admission has room for these again."""
        self._give_back_shared(calls, bytes_)
        if self.origin.account is not None:
            self.origin.account.give_back(calls)

    def _settle(self) -> None:
        if self._taken[0]:
            self.give_back(*self._taken)
            self._taken = (0, 0)
