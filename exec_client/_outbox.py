"""Calls wait here, leave together, and are sent again when that is safe and may help.

How calls become requests
    `put` wakes `_flush` in the next turn of the event loop: all that wait by then share requests, and a single call leaves at
    once. A request keeps its connection until its last result; each result resolves its call when its line arrives, but a
    slow program holds the connection. So up to `connections` requests open freely; beyond that, up to `max_connections`, one
    more opens when enough calls wait to fill it, or when calls waited `grow_after_s` (the open requests are long-lived). With
    all of them open, calls wait for the next to end. Requests carry `calls_per_request` calls, and up to
    `max_calls_per_request` when that is what it takes to get everything that waits onto the connections that are left.

What is sent again, always with the same idempotency key
    refused (429, 503, a known service that refuses connections): the whole outbox pauses, then goes on; does not count as an
    attempt, because nothing was accepted. 429 also halves the request size: a request that is larger than the
    free capacity would always be refused.
    broken stream, 5xx, infra result: the unanswered calls, after a pause of their own; counts as an attempt.
    400, 409, 413, 422: the call that the error names gets it; the others leave again in two halves, and halves of halves, until
    a request holds one call and the error is its own. Unrelated calls share a request; one of them must not fail the others.

What is cancelled at the service
    A call whose user left: by the id of its request and its position there, when others still wait for the same request; those
    of one turn of the event loop together. When nobody waits any more, the connection is closed, which cancels what is left.

What is not sent again: a call that was withdrawn (`cancel`) while the service had it, or had not yet; it ends as `cancelled`.

Every call ends: answered, failed, cancelled by its user, or `DeadlineExceeded` by a timer of its own.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import re
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from functools import partial
from uuid import uuid4

import msgspec

from exec_client import errors
from exec_client._retry import Policy
from exec_client._transport import Transport
from exec_wire import Call, Result, Selection, verdict

log = logging.getLogger("exec_client")

CANCEL_S = 5.0  # for one attempt to cancel calls at the service
CANCELS_AT_ONCE = 256  # calls in one such request, whose query has to fit into what proxies let pass
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,90}")  # with an id of our own after it, the service takes 128 characters


class Ticket:
    """One call that somebody waits for."""

    __slots__ = tuple("attempts call deadline future index last_error position queued_at request size timer withdrawn".split())

    def __init__(self, call: Call, size: int, index: int, loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.size = size
        self.index = index  # the position in the user's list
        self.deadline = loop.time() + call.deadline_s
        self.future: asyncio.Future[Result] = loop.create_future()
        self.attempts = 0
        self.last_error: errors.ExecError | None = None
        self.queued_at = loop.time()
        self.request: OpenRequest | None = None
        self.position = 0  # the position in the request
        self.timer: asyncio.TimerHandle | None = None
        self.withdrawn = False

    def withdraw(self) -> bool:
        """Stop sending the call. True if that ends it; otherwise the service has it and its result is awaited."""
        self.withdrawn = True
        if self.request is not None:
            return False
        self.finish(verdict("cancelled", id=self.call.id))
        return True

    def finish(self, result: Result) -> None:
        result.index = self.index
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: errors.ExecError) -> None:
        if self.future.done():
            return
        if self.withdrawn and isinstance(error, errors.Unavailable):
            return self.finish(verdict("cancelled", id=self.call.id))
        own = copy.copy(error)  # one broken connection fails many calls; each user gets an exception object of his own
        own.__cause__ = error.__cause__ or error.__context__
        own.index = self.index
        if isinstance(own, errors.Unavailable) and own.result is None and isinstance(self.last_error, errors.Unavailable):
            own.result = self.last_error.result
        self.future.set_exception(own)

    def expire(self) -> None:
        late = errors.DeadlineExceeded(f"no answer within {self.call.deadline_s:g} s")
        late.__cause__ = self.last_error
        self.fail(late)


class OpenRequest:
    """One request under way, and the tickets that wait for its results."""

    __slots__ = ("abandoned", "accepted", "request_id", "size", "task", "unanswered")

    def __init__(self, tickets: list[Ticket], request_id: str) -> None:
        self.request_id = request_id
        self.size = len(tickets)
        self.abandoned = False  # somebody left
        self.unanswered = dict(enumerate(tickets))
        self.accepted = False
        self.task: asyncio.Task[None] | None = None
        for position, ticket in self.unanswered.items():
            ticket.request, ticket.position = self, position

    def pop(self, position: int) -> Ticket | None:
        ticket = self.unanswered.pop(position, None)
        if ticket is not None:
            ticket.request = None
        return ticket

    def pop_all(self) -> list[Ticket]:
        tickets = [self.pop(position) for position in list(self.unanswered)]
        return [ticket for ticket in tickets if ticket is not None]

    def leave(self, ticket: Ticket) -> None:
        """The user of the ticket left. When all have left, closing the request makes the service cancel it."""
        self.pop(ticket.position)
        self.abandoned = True
        if not self.unanswered and self.task is not None:
            self.task.cancel()


class Outbox:
    """Belongs to the event loop that made it."""

    def __init__(self, transport: Transport, policy: Policy, name: str = "") -> None:
        """`name`: what the ids of its requests begin with, if the service would take it for a request id."""
        self._transport = transport
        self._name = f"{name}/" if _REQUEST_ID.fullmatch(name) else ""
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._tickets: set[Ticket] = set()  # every call that is not answered yet, wherever it is
        self._waiting: deque[Ticket] = deque()
        self._halves: deque[list[Ticket]] = deque()  # parts of refused requests, which must not be joined again
        self._open: dict[asyncio.Task[None], OpenRequest] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._flush_at = 0.0
        self._closed = False
        self._reached = False  # the service has answered something
        self._request_calls = policy.max_calls_per_request
        self._paused_until = 0.0
        self._refusals = 0  # in a row; those of one pause count once
        self._last_refusal: errors.ExecError = errors.Overloaded()
        self._to_cancel: dict[tuple[OpenRequest, str], list[int]] = {}  # positions, by request and tenant
        self._cancels: set[asyncio.Task[None]] = set()
        self._cancel_refused = False  # so that it is logged once

    # -- in ------------------------------------------------------------------------------------------------------------------

    def put(self, call: Call, size: int, index: int = 0) -> asyncio.Future[Result]:
        """Cancelling the future gives the call up."""
        ticket = Ticket(call, size, index, self._loop)
        self._tickets.add(ticket)
        ticket.timer = self._loop.call_at(ticket.deadline + self._policy.grace_s, ticket.expire)
        ticket.future.add_done_callback(partial(self._settled, ticket))
        if self._paused_until >= ticket.deadline:
            ticket.fail(self._last_refusal)
        else:
            self._queue([ticket])
        return ticket.future

    def _settled(self, ticket: Ticket, _: object) -> None:
        self._tickets.discard(ticket)
        if ticket.timer is not None:
            ticket.timer.cancel()
        if (request := ticket.request) is not None:
            request.leave(ticket)
            self._cancel_soon(request, ticket)

    def _queue(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.queued_at = self._loop.time()
            self._waiting.append(ticket)
        self._flush_in(0)

    def withdraw(self, selection: Selection) -> int:
        """Send none of these any more; how many of them the service does not have."""
        picked = [ticket for ticket in self._tickets if selection.picks(ticket.call.tags, ticket.call.tenant)]
        return sum(ticket.withdraw() for ticket in picked)

    # -- cancelling at the service -------------------------------------------------------------------------------------------

    def cancel_withdrawn(self) -> None:
        """Have the service cancel what it was sent and has not answered. It may not have had it when it was asked by tags."""
        for ticket in self._tickets:
            if ticket.withdrawn and ticket.request is not None:
                self._cancel_soon(ticket.request, ticket)

    def _cancel_soon(self, request: OpenRequest, ticket: Ticket) -> None:
        if self._closed:
            return  # the requests are given up
        if not self._to_cancel:
            self._loop.call_soon(self._send_cancels)
        self._to_cancel.setdefault((request, ticket.call.tenant), []).append(ticket.position)

    def _send_cancels(self) -> None:
        to_cancel, self._to_cancel = self._to_cancel, {}
        for (request, tenant), positions in to_cancel.items():
            for at in range(0, len(positions), CANCELS_AT_ONCE):
                selection = Selection(request=request.request_id, index=positions[at : at + CANCELS_AT_ONCE], tenant=tenant)
                task = self._loop.create_task(self._cancel(request, selection))
                self._cancels.add(task)
                task.add_done_callback(self._cancels.discard)

    async def _cancel(self, request: OpenRequest, selection: Selection) -> None:
        """Nobody waits for this. It is tried again while the request is open; the end of the request cancels too."""
        for attempt in range(1, self._policy.max_attempts + 1):
            if not request.unanswered:
                return
            try:
                await self._transport.cancel(selection, CANCEL_S)
                return
            except errors.Unavailable:
                await asyncio.sleep(self._policy.pause_s(attempt))
            except errors.ExecError as error:  # such as from a service that is too old to know such requests
                if not self._cancel_refused:
                    log.warning("the service does not cancel single calls; they run until their request ends: %s", error)
                self._cancel_refused = True
                return

    # -- out -----------------------------------------------------------------------------------------------------------------

    def _flush_in(self, delay_s: float) -> None:
        at = self._loop.time() + delay_s
        if self._closed or (self._flush_handle is not None and self._flush_at <= at):
            return
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._flush_at = at
        self._flush_handle = self._loop.call_later(delay_s, self._flush) if delay_s else self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_handle = None
        while self._waiting or self._halves:
            hold_s = self._hold_s()
            if hold_s is None:
                return  # the end of a request flushes again
            if hold_s > 0:
                return self._flush_in(hold_s)
            if tickets := self._take():
                self._open_request(tickets)
                return self._flush_in(0)  # one by one: the first is on its way while the others are made

    def _hold_s(self) -> float | None:
        """How long until another request may open; None: not before one ends."""
        policy, now, open_requests = self._policy, self._loop.time(), len(self._open)
        if now < self._paused_until:
            return self._paused_until - now
        if open_requests < policy.connections:
            return 0
        if open_requests >= policy.max_connections:
            return None
        if self._halves or len(self._waiting) >= policy.calls_per_request:
            return 0
        return max(0.0, self._waiting[0].queued_at + policy.grow_after_s - now)

    def _take(self) -> list[Ticket]:
        """The next request. Skips calls whose users left; fails those that have no time left."""
        if self._halves:
            return [ticket for ticket in self._halves.popleft() if self._can_leave(ticket)]
        tickets: list[Ticket] = []
        size, most = 0, self._most_calls()
        while self._waiting and len(tickets) < most:
            ticket = self._waiting[0]
            if tickets and size + ticket.size > self._policy.max_request_bytes:
                break
            self._waiting.popleft()
            if self._can_leave(ticket):
                tickets.append(ticket)
                size += ticket.size
        return tickets

    def _most_calls(self) -> int:
        free = self._policy.max_connections - len(self._open)
        to_fit_all = -(-len(self._waiting) // max(free, 1))
        return max(1, min(self._request_calls, max(self._policy.calls_per_request, to_fit_all)))

    def _can_leave(self, ticket: Ticket) -> bool:
        if ticket.withdrawn or ticket.deadline <= self._loop.time():
            if ticket.last_error is not None:
                ticket.fail(ticket.last_error)  # the reason why it is here again says more than the time
            else:
                ticket.expire()
        return not ticket.future.done()

    def _open_request(self, tickets: list[Ticket]) -> None:
        request = OpenRequest(tickets, f"{self._name}{uuid4().hex}")
        now = self._loop.time()
        calls = [msgspec.structs.replace(ticket.call, deadline_s=max(ticket.deadline - now, 0.001)) for ticket in tickets]
        timeout_s = max(ticket.deadline for ticket in tickets) - now + self._policy.grace_s
        request.task = self._loop.create_task(self._receive(request, calls, timeout_s))
        self._open[request.task] = request
        request.task.add_done_callback(self._ended)

    async def _receive(self, request: OpenRequest, calls: list[Call], timeout_s: float) -> None:
        try:
            async with aclosing(self._transport.send(calls, timeout_s, request.request_id)) as results:
                async for result in results:
                    self._answer(request, result)
                    if request.abandoned and not request.unanswered:
                        return  # nobody waits for the rest; closing the connection cancels it
            if request.unanswered:
                raise errors.ConnectionFailed(f"the answer ended {len(request.unanswered)} results short of {request.size}")
        except errors.CallerError as error:
            self._reached = True
            self._rejected(request, error)
        except errors.ExecError as error:
            self._failed(request, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        request = self._open.pop(task)
        if task.cancelled():
            why = "the request was cancelled from outside, as when an event loop ends"
            self._fail(request.pop_all(), errors.ClientClosed(why))
        elif (bug := task.exception()) is not None:
            unexpected = errors.ProtocolError(f"the transport raised {type(bug).__name__}: {bug}")
            unexpected.__cause__ = bug
            self._fail(request.pop_all(), unexpected)
        self._flush_in(0)

    # -- back ----------------------------------------------------------------------------------------------------------------

    def _answer(self, request: OpenRequest, result: Result) -> None:
        if not request.accepted:
            self._accepted(request)
        if not 0 <= result.index < request.size:
            raise errors.ProtocolError(f"a result for call {result.index} of {request.size}", retryable=True)
        ticket = request.pop(result.index)
        if ticket is None:
            return  # answered before: the first answer wins; or its user left
        if result.blame != "infra":
            return ticket.finish(result)
        failure = errors.InfraFailure.of(result, ticket.attempts + 1)
        if result.retryable:
            self._again([ticket], failure)
        else:
            ticket.fail(failure)

    def _accepted(self, request: OpenRequest) -> None:
        request.accepted = self._reached = True
        self._refusals = 0
        self._request_calls = min(self._policy.max_calls_per_request, self._request_calls * 2)

    def _failed(self, request: OpenRequest, error: errors.ExecError) -> None:
        """The request as a whole failed; no call of it is to blame."""
        tickets = request.pop_all()
        if isinstance(error, errors.Overloaded | errors.NotReady):
            self._reached = True
            self._pause(tickets, error, request.size)
        elif isinstance(error, errors.ConnectionFailed) and not error.sent and self._reached:
            self._pause(tickets, error, request.size)  # a service that restarts; one that never answered is a wrong address
        elif isinstance(error, errors.ProtocolError) and not error.retryable:
            self._fail(tickets, error)
        else:
            self._again(tickets, error)

    def _pause(self, tickets: list[Ticket], error: errors.ExecError, size: int) -> None:
        """Hold everything back for a while; these go first afterwards."""
        now = self._loop.time()
        if now >= self._paused_until:  # else one more refusal of the same wave
            self._refusals += 1
            if isinstance(error, errors.Overloaded):
                self._request_calls = max(1, size // 2)
        asked_s = error.retry_after_s if isinstance(error, errors.Overloaded | errors.NotReady) else None
        pause_s = asked_s * random.uniform(1.0, 1.25) if asked_s else self._policy.pause_s(max(1, self._refusals))
        self._paused_until = max(self._paused_until, now + pause_s)
        self._last_refusal = error
        self._waiting.extendleft(reversed(self._with_time_until(self._paused_until, tickets, error)))

    def _again(self, tickets: list[Ticket], error: errors.ExecError) -> None:
        """Each of these may have been started; send it once more after a pause, if it has attempts and time left."""
        left = []
        for ticket in tickets:
            ticket.attempts += 1
            if ticket.attempts < self._policy.max_attempts:
                left.append(ticket)
            else:
                ticket.fail(error)
        pause_s = self._policy.pause_s(max((ticket.attempts for ticket in left), default=1))
        if left := self._with_time_until(self._loop.time() + pause_s, left, error):
            self._loop.call_later(pause_s, self._queue, left)

    def _with_time_until(self, time: float, tickets: list[Ticket], error: errors.ExecError) -> list[Ticket]:
        """Those that can wait until `time`. The others fail now, with the reason, as waiting longer cannot help them."""
        left = []
        for ticket in tickets:
            if time < ticket.deadline and not ticket.withdrawn:
                ticket.last_error = error
                left.append(ticket)
            else:
                ticket.fail(self._overdue(ticket, error) or error)
        return left

    def _overdue(self, ticket: Ticket, error: errors.ExecError) -> errors.DeadlineExceeded | None:
        """The service's result for a call past its deadline: `expired`, or how it cut the program short."""
        if not isinstance(error, errors.InfraFailure) or error.result is None:
            return None
        if error.result.status != "expired" and self._loop.time() < ticket.deadline:
            return None
        return errors.DeadlineExceeded(
            f"no answer within {ticket.call.deadline_s:g} s; the service says: {error}", result=error.result
        )

    def _rejected(self, request: OpenRequest, error: errors.CallerError) -> None:
        """Give the error to the call it is about, and the others another chance without it."""
        if error.code == "too_many_calls":
            self._request_calls = max(1, request.size // 2)
        position, field = _named_call(error)
        named = request.pop(position) if position is not None else None
        if named is not None:
            error.field = field
            named.fail(error)
        others = request.pop_all()
        if named is None and (len(others) == 1 or error.status not in (400, 409, 413, 422)):
            return self._fail(others, error)
        middle = (len(others) + 1) // 2
        self._halves.extend(half for half in (others[:middle], others[middle:]) if half)

    def _fail(self, tickets: list[Ticket], error: errors.ExecError) -> None:
        for ticket in tickets:
            ticket.fail(error)

    # -- end -----------------------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Fail what is unanswered, then give up the requests; the service cancels what they hold."""
        self._closed = True
        self._fail(list(self._tickets), errors.ClientClosed("the client was closed before this call was answered"))
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        for task in [*self._open, *self._cancels]:
            task.cancel()
        await asyncio.gather(*self._open, *self._cancels, return_exceptions=True)


def _named_call(error: errors.CallerError) -> tuple[int | None, str]:
    """`$.calls[3].limits.wall_s` → 3 and `$.limits.wall_s`, the path as the call's user knows it."""
    match = re.match(r"\$\.calls\[(\d+)\]", error.field)
    return (int(match[1]), f"${error.field[match.end() :]}") if match else (None, error.field)
