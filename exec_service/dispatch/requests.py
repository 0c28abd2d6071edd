"""Who waits for what: results land by id in the order (the request) that asked for them.

One reader per gateway receives all answers. The first answer of an id wins; later ones are counted and dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from msgspec import Struct

from exec_service.dispatch.call_table import Flight, Waiter
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Call, Result
from exec_wire.queue.protocol import Answer, GatewayQueue, QueueUnavailable
from exec_wire.supervisor import Supervisor

RETRY_S = 0.5
# Between two visits of a reader who waits for more: to write and read each result by itself costs 5 % of a short call.
PACE_S = 0.01


class Origin(Struct, frozen=True):
    """Where a request came from; goes into its results and logs."""

    request_id: str = ""
    traceparent: str = ""
    door: str = ""  # of another service's clients, if it came through one (`exec_service.compat`)
    account: Account | None = None  # of the caller's key; None where no keys are asked for
    warnings: dict[int, list[str]] = {}  # of the request's calls by their index: what they have that nobody knows

    def tenant_of(self, call: Call) -> str:
        return self.account.tenant if self.account is not None else call.tenant


ANONYMOUS = Origin()


class Order:
    """One accepted request. Results land here; one reader takes all that are there.

    Use as a context manager: leaving it cancels whatever is still pending.
    """

    def __init__(
        self,
        origin: Origin,
        close: Callable[[Order], None],
        give_back: Callable[[int, int], None],
        *,
        expecting: bool = False,
    ) -> None:
        self.origin = origin
        self.expecting = expecting  # more calls may join, until `expect_no_more`
        self.pending: set[Waiter] = set()
        self.closed = False
        self._close, self._give_back_shared = close, give_back
        self._landed: list[Result] = []
        self._landed_bytes = 0
        self._taken = (0, 0)  # calls and bytes that the reader is writing out
        self._changed = asyncio.Event()
        self._due_at = 0.0  # when the reader may come again, if something is pending then
        self._bell: asyncio.TimerHandle | None = None

    def __enter__(self) -> Order:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def land(self, waiter: Waiter, result: Result) -> None:
        self.pending.discard(waiter)
        self._landed.append(result)
        self._landed_bytes += waiter.bytes
        self._call_reader()

    def _call_reader(self) -> None:
        """At once, or a moment after it was here last; then with all that has landed since."""
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
        """Wait for results and take all that have landed; an empty list when there will be no more.

        What was taken before counts as delivered now: the reader comes again when it has written it.
        """
        self._settle()
        while not (self._landed and self._is_due()) and (self.pending or self.expecting) and not self.closed:
            if self._landed:
                self._call_reader()  # it is not due yet, and nobody else may ring
            await self._changed.wait()
            self._changed.clear()
        self._due_at = asyncio.get_running_loop().time() + PACE_S
        return self._take_landed()

    def expect_no_more(self) -> None:
        self.expecting = False
        self._changed.set()

    async def take_all(self, check: Callable[[], None] = lambda: None) -> list[Result]:
        """Wait until every result has landed, then take them in the order of the calls. `check` may raise while some wait for
        others."""
        while self.pending and not self.closed:
            await self._changed.wait()
            self._changed.clear()
            if self.pending:
                check()
        return sorted(self._take_landed(), key=lambda result: result.index)

    def close(self) -> None:
        """The caller has everything or is gone."""
        if self.closed:
            return
        self.closed = True
        self._close(self)
        self._take_landed()
        self._settle()
        self._changed.set()

    def _take_landed(self) -> list[Result]:
        taken, self._landed = self._landed, []
        calls, bytes_ = self._taken
        self._taken = (calls + len(taken), bytes_ + self._landed_bytes)
        self._landed_bytes = 0
        return taken

    def give_back(self, calls: int, bytes_: int) -> None:
        """These are no longer inside."""
        self._give_back_shared(calls, bytes_)
        if self.origin.account is not None:
            self.origin.account.give_back(calls)

    def _settle(self) -> None:
        if self._taken[0]:
            self.give_back(*self._taken)
            self._taken = (0, 0)


class Waiters:
    """The flights that await an answer, by id."""

    def __init__(
        self,
        queue: GatewayQueue,
        answered: Callable[[Flight, Answer], None],
        late: Callable[[], None],
        queue_is: Callable[[str], None],
        supervisor: Supervisor,
    ) -> None:
        """`queue_is` is told why the queue is away."""
        self._queue, self._answered, self._late, self._queue_is = queue, answered, late, queue_is
        self._resolve_guarded = supervisor.guarded("answers", self._resolve)
        self._flights: dict[str, Flight] = {}
        self._asked: dict[str, asyncio.Future[Answer]] = {}  # of single workers

    def __len__(self) -> int:
        return len(self._flights)

    def expect(self, flight: Flight) -> None:
        self._flights[flight.id] = flight

    def forget(self, flight: Flight) -> None:
        self._flights.pop(flight.id, None)

    def find(self, id: str) -> Flight | None:
        return self._flights.get(id)

    def first_unreleased(self) -> Flight | None:
        """The oldest that waits: flights are here in the order of their acceptance, and few of them are released."""
        return next((flight for flight in self._flights.values() if not flight.released and flight.waiters), None)

    @contextmanager
    def asking(self, id: str) -> Iterator[asyncio.Future[Answer]]:
        """The answer of one worker, while somebody waits for it."""
        future = self._asked[id] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._asked[id]

    def flights(self) -> list[Flight]:
        return list(self._flights.values())

    async def read_forever(self) -> NoReturn:
        while True:
            try:
                answers = await self._queue.receive()
            except QueueUnavailable as away:
                self._queue_is(str(away))
                await asyncio.sleep(RETRY_S)
                continue
            for answer in answers:
                self._resolve_guarded(answer)  # they come once: a failure at one must not lose the others

    def _resolve(self, answer: Answer) -> None:
        asked = self._asked.get(answer.id)
        if asked is not None:
            if not asked.done():
                asked.set_result(answer)
            return
        flight = self._flights.pop(answer.id, None)
        if flight is None:
            self._late()
        else:
            self._answered(flight, answer)
