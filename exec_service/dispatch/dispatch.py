"""From acceptance to results: admission, waiting, release to the workers by credit, deadlines, cancellation.

Knows no HTTP: every door decodes, calls `accept`, and encodes what lands. No task per call: one task reads answers, one
releases calls, one looks for calls that the queue has lost, and one timer watches all deadlines.

While the queue is away, what was accepted is kept and published when it is back; new calls are accepted while there is room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import msgspec
from msgspec import UNSET

from exec_service.config import GatewayConfig
from exec_service.dispatch.admission import Admission, Room
from exec_service.dispatch.call_table import Flight, Key, Waiter
from exec_service.dispatch.deadlines import Deadlines
from exec_service.dispatch.fair_queue import Places, Waiting, same_weight
from exec_service.dispatch.idempotency import Idempotency, PayloadDiffers, Record
from exec_service.dispatch.released import Released
from exec_service.dispatch.requests import ANONYMOUS, Order, Origin, Waiters
from exec_service.dispatch.workers import Fleet
from exec_service.refusals import Draining, IdempotencyConflict, NotReady, Overloaded
from exec_service.telemetry.metrics import Metrics
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import MAX_STARTS, Call, Result, Selection, Tags, unpack_result, verdict
from exec_wire.queue.early_cancels import EarlyCancels
from exec_wire.queue.protocol import (
    FORGOTTEN_S,
    RECONCILE_S,
    RENEW_S,
    Answer,
    GatewayQueue,
    Job,
    QueueUnavailable,
    class_of,
    record_name,
)
from exec_wire.supervisor import Supervisor, stop

log = logging.getLogger("exec_service.dispatch.dispatch")

RETRY_S = 0.5
CANCELS_PER_TURN = 500  # of the event loop: answering one takes about 20 µs
RELEASED_AT_ONCE, BYTES_AT_ONCE = 512, 4 << 20  # in one publication, which is all or nothing
LAST_CANCELS_S = 3.0  # at a stop, for what is still to be cancelled
LOOK_UP_S = 1.0  # for the records of other gateways; a call that waits longer for them is run
EARLY_S = 1.0  # a worker that finds a call late by more than this before its deadline was told a wrong time
_pack_sorted = msgspec.msgpack.Encoder(order="deterministic").encode  # the order of `files` and `env` says nothing
_NO_TAGS = Tags()
FINGERPRINT_BYTES = 16  # of a record, before its result
_UNTIMED_S = 60.0  # the default of `Call.deadline_s`, which packing leaves out


def program_of(call: Call) -> bytes:
    """What a worker gets, and what makes two calls the same: everything but label, deadline, tags and idempotency key."""
    return _pack_sorted(msgspec.structs.replace(call, id="", deadline_s=_UNTIMED_S, tags=_NO_TAGS, idempotency_key=""))


class Dispatch:
    def __init__(
        self,
        config: GatewayConfig,
        queue: GatewayQueue,
        fleet: Fleet,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        weight_of: Callable[[str], float] = same_weight,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self._config, self._queue, self._fleet, self._metrics, self._clock = config, queue, fleet, metrics, clock
        arriving = max(config.max_bytes // 2, config.max_body_bytes)  # the rest is for requests that come in one piece
        self.admission = Admission(config.max_calls, config.max_bytes, config.retry_after_max_s, clock, arriving)
        self.waiting = Waiting(weight_of)
        self.released = Released()
        self.draining, self.draining_because = False, ""  # the reason if nobody asked for it
        self.away_because = ""  # if not empty, the queue cannot be used, in these words
        self._reached = False  # since it was last away, the queue has answered
        self.not_ready_because = ""  # if not empty, nothing can be run here, in these words
        self._waiters = Waiters(queue, self._answered, metrics.late, self.queue_is, self._supervisor)
        self._idempotency = Idempotency(config.idempotency_ttl_s, config.idempotency_max_bytes, clock)
        self._deadlines: Deadlines[Waiter] = Deadlines(self._supervisor.guarded("deadlines", self._overdue), clock)
        self._to_cancel: list[str] = []
        self._cancelling: set[asyncio.Task[int]] = set()  # requests to cancel, each until every gateway has answered
        # By tenant, request id and index; None in place of an index stands for all.
        self._early_cancels: EarlyCancels[tuple[str, str, int | None]] = EarlyCancels(clock)
        self._forgotten, self._forgetful_until = queue.forgotten, float("-inf")
        self._work = asyncio.Event()
        self._orders: dict[str, set[Order]] = {}  # by request id, which callers may choose
        self._rooms: set[Room] = set()  # of requests that make their calls one by one
        self._stopping = False
        self._emptied = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Ids of a restarted gateway must not meet answers to its former self.
        self._ids = (f"{prefix}-{number:x}" for prefix in [secrets.token_hex(6)] for number in itertools.count())

    # -- accepting --------------------------------------------------------------------------------------------------------

    async def run_batch(self, calls: Sequence[Call], origin: Origin = ANONYMOUS) -> AsyncIterator[Result]:
        """Admission to results, each as it lands. Leaving the iteration early cancels what is pending."""
        with self.accept(calls, origin) as order:
            while landed := await order.take():
                for result in landed:
                    yield result

    @property
    def window(self) -> int:
        """How many calls can be with the workers at once."""
        return self._fleet.window

    @property
    def oldest_wait_s(self) -> float:
        """How long the call that waits longest for a place at the workers has waited."""
        flight = self._waiters.first_unreleased()
        return self._clock() - flight.waiters[0].accepted_at if flight is not None else 0.0

    def check_open(self) -> None:
        """Raise a `Refusal` if no call would be accepted, whatever it is."""
        if self.draining:
            raise Draining(self.draining_because)
        if self.not_ready_because:
            raise NotReady(self.not_ready_because, self._config.retry_after_max_s)

    def asking(self, id: str) -> AbstractContextManager[asyncio.Future[Answer]]:
        """Wait for the answer of one worker to what is not a call."""
        return self._waiters.asking(id)

    def check_ready(self) -> None:
        """Raise a `Refusal` if no call can be kept: while the queue is away, only as many as there is room for."""
        self.check_open()
        if self.away_because:
            self._admit(1)

    def reserve(self, calls: int, bytes_: int, origin: Origin) -> Room:
        """Admit calls that are accepted later, or raise a `Refusal`."""
        self.check_open()
        self._admit(calls, bytes_)
        room = Room(self.admission, origin.account, calls, bytes_, self._vacated)
        self._rooms.add(room)
        return room

    def _admit(self, calls: int, bytes_: int = 0) -> None:
        try:
            self.admission.check(calls, bytes_)
        except Overloaded as overloaded:
            if not self.away_because:
                raise
            words = f"the queue is away ({self.away_because}) and no more calls can be kept: {overloaded.detail}"
            raise NotReady(words, overloaded.retry_after_s or self._config.retry_after_max_s) from None

    async def look_up(self, calls: Sequence[Call], origin: Origin) -> None:
        """Before `accept`: learn what other gateways' calls with the same keys have come to."""
        if not self._queue.shared or self.away_because:
            return
        keys = {Key(origin.tenant_of(call), call.idempotency_key) for call in calls if call.idempotency_key}
        unknown = [key for key in keys if not self._idempotency.knows(key)]
        if not unknown:
            return
        try:
            async with asyncio.timeout(LOOK_UP_S):
                found = await self._queue.recorded([record_name(key.tenant, key.key) for key in unknown])
        except (QueueUnavailable, TimeoutError):
            return  # it is run again, which nobody can tell
        for key, record in zip(unknown, found, strict=True):
            if record is not None:
                self._idempotency.adopt(key, record[:FINGERPRINT_BYTES], record[FINGERPRINT_BYTES:])

    def open_order(self, origin: Origin) -> Order:
        """One that calls join over time, by `accept`."""
        self.check_open()
        order = Order(origin, self._closed, self._give_back, expecting=True)
        self._orders.setdefault(origin.request_id, set()).add(order)
        return order

    def accept(
        self,
        calls: Sequence[Call],
        origin: Origin,
        room: Room | None = None,
        *,
        order: Order | None = None,
        first_index: int = 0,
    ) -> Order:
        """Take responsibility for all of `calls`, or raise a `Refusal` and for none of them. Those of a `room` are admitted."""
        if room is None:
            self.check_open()
            self._admit(len(calls))  # before the work of packing
        if origin.account is not None:
            calls = _permitted(calls, origin.account, reserved=room is not None, lower=bool(origin.door))
        programs = [program_of(call) for call in calls]
        self._check_keys(calls, programs)
        if room is None:
            self._admit(len(calls), sum(map(len, programs)))
        else:
            room.use(len(calls), sum(map(len, programs)))
        if origin.account is not None:
            (origin.account.take_up if room is None else origin.account.charge)(len(calls))

        if order is None:
            order = Order(origin, self._closed, self._give_back)
            self._orders.setdefault(origin.request_id, set()).add(order)
        now = self._clock()
        for index, (call, program) in enumerate(zip(calls, programs, strict=True), first_index):
            self.admission.charge(1, len(program))
            waiter = Waiter(order, index, call.id, now, now + call.deadline_s, len(program), call.tags, call.tenant)
            order.pending.add(waiter)
            self._seat(waiter, call, program)
            if self._early_cancels and self._was_cancelled_early(waiter):
                self._cancel(waiter)
        self._work.set()
        return order

    def _check_keys(self, calls: Sequence[Call], programs: list[bytes]) -> None:
        """A key stands for one program, also within a request."""
        here: dict[Key, bytes] = {}
        for index, (call, program) in enumerate(zip(calls, programs, strict=True)):
            if not call.idempotency_key:
                continue
            key = Key(call.tenant, call.idempotency_key)
            try:
                self._idempotency.find(key, program)
            except PayloadDiffers:
                raise IdempotencyConflict(index) from None
            if here.setdefault(key, program) != program:
                raise IdempotencyConflict(index)

    def _seat(self, waiter: Waiter, call: Call, program: bytes) -> None:
        """Give the waiter a flight: a running one, or a new one; or at once the recorded result of a finished one."""
        if self._stopping:
            self._land(waiter, _shut_down(), 0)
            return
        key = Key(call.tenant, call.idempotency_key) if call.idempotency_key else None
        found = self._idempotency.find(key, program) if key else None
        if isinstance(found, Record):
            self._land(waiter, unpack_result(found.payload), len(found.payload))
            return
        flight = found or self._take_off(program, call, key)
        flight.waiters.append(waiter)
        waiter.flight = flight
        self._deadlines.set(waiter, waiter.deadline_at)

    def _take_off(self, program: bytes, call: Call, key: Key | None) -> Flight:
        needs = class_of(call.language, call.require_tier)
        flight = Flight(next(self._ids), program, needs, key, call.priority, call.tenant)
        self._idempotency.start(flight)
        self._waiters.expect(flight)  # before it is released: a fast worker may answer first
        self.waiting.put(flight)
        return flight

    # -- landing ----------------------------------------------------------------------------------------------------------

    def _answered(self, flight: Flight, answer: Answer) -> None:
        self.waiting.remove(flight)  # a publication that failed half way may be answered while it waits again
        first = read_result(answer)
        if first.status == "expired" and self._is_early(flight):
            self._waiters.expect(flight)
            self._publish_again([flight])
            return
        self.released.remove(flight)
        if flight.publications > 1:
            self._to_cancel.append(flight.id)  # the other copy
        if not flight.cancelled:
            self._idempotency.finish(flight, answer.payload, first.blame)
        elif first.status != "cancelled":
            first = verdict("cancelled")  # it ended before the kill arrived; its caller was told that it is cancelled
        waiters, flight.waiters = flight.waiters, []
        for waiter in waiters:
            result = first if waiter is waiters[0] else read_result(answer)
            self._land(waiter, result, len(answer.payload), answer.stay_ms)
        self._work.set()

    def _is_early(self, flight: Flight) -> bool:
        """Only the clock of the queue's server can have jumped: ours says that there is time left."""
        return self._queue.shared and not flight.cancelled and self._clock() < flight.deadline_at - EARLY_S

    def _land(self, waiter: Waiter, result: Result, bytes_: int, stay_ms: float = 0.0) -> None:
        """Make the result this caller's own and hand it over."""
        order = waiter.order
        result.id, result.index = waiter.label, waiter.index
        result.request_id, result.traceparent = order.origin.request_id, order.origin.traceparent
        if order.origin.warnings:
            result.warnings = order.origin.warnings.pop(waiter.index, [])
        total_ms = (self._clock() - waiter.accepted_at) * 1000
        result.timings.total_ms = round(total_ms, 3)
        result.timings.queue_ms = round(max(0.0, total_ms - stay_ms), 3)
        self._deadlines.remove(waiter)
        waiter.flight = None
        self.admission.charge(0, bytes_ - waiter.bytes)  # from now on it is the result that takes room
        waiter.bytes = bytes_
        self._metrics.finished(result, order.origin.door, waiter.tenant, waiter.tags)
        order.land(waiter, result)

    # -- deadlines, cancellation ------------------------------------------------------------------------------------------

    def _overdue(self, waiter: Waiter) -> None:
        flight = waiter.flight
        if flight is None:
            return
        if not flight.released:
            self._give_up(waiter, verdict("expired", error="the deadline passed while the call waited for a slot"))
        elif not waiter.in_grace:
            # The worker kills by the same deadline; its answer needs a moment.
            waiter.in_grace = True
            self._deadlines.set(waiter, waiter.deadline_at + self._config.answer_grace_s)
        else:
            self._give_up(waiter, verdict("worker_lost", error="no worker answered by the deadline"))

    def _give_up(self, waiter: Waiter, result: Result) -> None:
        flight = waiter.flight
        self._land(waiter, verdict("cancelled") if flight is not None and flight.cancelled else result, 0)
        if flight is not None:
            self._unseat(waiter, flight)

    def _unseat(self, waiter: Waiter, flight: Flight) -> None:
        flight.waiters.remove(waiter)
        if flight.waiters:
            return  # somebody else waits for the same run
        self._waiters.forget(flight)
        self._idempotency.stop(flight)
        self.waiting.remove(flight)
        if self.released.remove(flight) or flight.publications:  # the queue has it, or may have it after a failed publication
            self._to_cancel.append(flight.id)
        self._work.set()

    async def cancel(self, selection: Selection) -> int:
        """Cancel what it picks, here and at other gateways, and say how many that were.

        What waits is answered at once, what runs when it was killed. It runs in a task of its own: it goes on when the caller
        disconnects, and `stop` waits for it.
        """
        task = asyncio.create_task(self._cancel_everywhere(selection))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
        return await asyncio.shield(task)

    async def _cancel_everywhere(self, selection: Selection) -> int:
        here = await self._cancel_here(selection)
        try:
            return here + await self._queue.ask_others(selection)
        except QueueUnavailable as away:
            log.warning("cannot ask other gateways to cancel: %s", away)
            return here

    async def _serve_asks_forever(self) -> NoReturn:
        while True:
            try:
                for ask in await self._queue.asked():
                    await self._queue.tell(ask, await self._cancel_here(ask.selection))
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _cancel_here(self, selection: Selection) -> int:
        picked = self._picked_of_request(selection) if selection.request is not UNSET else self._picked_of_all(selection)
        count = 0
        for position, waiter in enumerate(picked, 1):
            count += self._cancel(waiter)
            if position % CANCELS_PER_TURN == 0:
                await asyncio.sleep(0)
        return count

    def _picked_of_all(self, selection: Selection) -> list[Waiter]:
        flights = [flight for flight in self._waiters.flights() if not flight.cancelled]
        return [waiter for flight in flights for waiter in flight.waiters if selection.picks(waiter.tags, waiter.tenant)]

    def _picked_of_request(self, selection: Selection) -> list[Waiter]:
        """An index without a call is remembered: the request may be on its way, or have come to another gateway."""
        request, wanted = str(selection.request), set(selection.index)
        pending = [waiter for order in self._orders.get(request, ()) for waiter in order.pending]
        picked = [
            waiter
            for waiter in pending
            if (not wanted or waiter.index in wanted) and selection.picks(waiter.tags, waiter.tenant)
        ]
        if not selection.names_a_tag:  # tags are compared with what is there
            for index in wanted.difference(waiter.index for waiter in picked):
                self._early_cancels.add((selection.tenant, request, index))
            if not wanted and not picked:
                self._early_cancels.add((selection.tenant, request, None))
        return picked

    def _was_cancelled_early(self, waiter: Waiter) -> bool:
        request = waiter.order.origin.request_id
        return (waiter.tenant, request, None) in self._early_cancels or self._early_cancels.take(
            (waiter.tenant, request, waiter.index)
        )

    def _cancel(self, waiter: Waiter) -> bool:
        flight = waiter.flight
        if flight is None or flight.cancelled:
            return False  # answered, left or cancelled by somebody else in the meantime
        if flight.released and len(flight.waiters) == 1:
            self._kill(waiter, flight)
        else:
            self._give_up(waiter, verdict("cancelled"))
        return True

    def _kill(self, waiter: Waiter, flight: Flight) -> None:
        """Have the worker end it. It keeps its place in the window until the worker says that it is dead."""
        flight.cancelled = True
        self._idempotency.stop(flight)  # who sends the key again does not join the dying but has it run
        self._to_cancel.append(flight.id)
        waiter.in_grace = True
        self._deadlines.set(waiter, self._clock() + self._config.answer_grace_s)
        self._work.set()

    def _closed(self, order: Order) -> None:
        """Its caller has everything or is gone: nobody waits for what is pending."""
        for waiter in order.pending:
            self._deadlines.remove(waiter)
            order.give_back(1, waiter.bytes)
            self._metrics.cancelled(order.origin.door, waiter.tenant, waiter.tags)
            flight, waiter.flight = waiter.flight, None
            if flight is not None:
                self._unseat(waiter, flight)
        order.pending.clear()
        same_id = self._orders[order.origin.request_id]
        same_id.discard(order)
        if not same_id:
            del self._orders[order.origin.request_id]
        self._emptied.set()

    def _vacated(self, room: Room) -> None:
        self._rooms.discard(room)
        self._emptied.set()

    # -- releasing to the workers -----------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """The fleet was read and may have changed, and with it the credit."""
        self._reached = True
        self._work.set()

    async def _release_forever(self) -> NoReturn:
        self._work.set()  # after a failure there is work left
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._send_cancels()
                await self._release()
                if self._reached:
                    self.queue_is("")
                continue
            except QueueUnavailable as away:
                self.queue_is(str(away))
            await asyncio.sleep(RETRY_S)
            self._work.set()

    def queue_is(self, away_because: str) -> None:
        """Away for that reason, or there if it is empty."""
        if away_because and not self.away_because:
            log.warning("the queue is away: %s; %d calls are kept", away_because, self.admission.calls)
        elif self.away_because and not away_because:
            log.warning("the queue is back; %d calls were kept", self.admission.calls)
        self.away_because = away_because
        self._reached = self._reached and not away_because

    async def _release(self) -> None:
        self._deadlines.run_due()  # what is overdue must not be started, even if the loop was late
        while flights := self._take():
            now = self._clock()
            for flight in flights:
                flight.released = True
                self.released.add(flight, now)
            for at, part in portions(flights):
                try:
                    await self._publish(part)
                except BaseException:
                    self._take_back(flights[at:])
                    raise

    def _give_back(self, calls: int, bytes_: int) -> None:
        was_full = self.admission.is_full
        self.admission.give_back(calls, bytes_)
        if was_full:
            self._work.set()

    def _take(self) -> list[Flight]:
        room = self._fleet.window - len(self.released)
        if room <= 0 or not self.waiting or self.admission.is_full:
            return []
        return self.waiting.take(min(RELEASED_AT_ONCE, room), self._room_for, self._places_for_bulk())

    def _room_for(self, needs: str) -> int:
        return self._fleet.window_for(needs) - self.released.of_class(needs)

    def _places_for_bulk(self) -> Places:
        """It never has the last one: what it has at the workers may take long, or be lost with one of them."""
        fleet, released = self._fleet, self.released
        return Places(
            bulk_window(fleet.window) - released.bulk,
            lambda needs: bulk_window(fleet.window_for(needs)) - released.bulk_of_class(needs),
        )

    async def _publish(self, flights: list[Flight]) -> None:
        jobs = [self._job(flight) for flight in flights if flight in self.released]  # else given up while the rest was sent
        try:
            await self._queue.publish(jobs)
        except QueueUnavailable as away:
            if not away.sent:
                for flight in flights:
                    flight.publications -= 1
            raise

    def _job(self, flight: Flight) -> Job:
        now = self._clock()
        remaining_ms = round((flight.deadline_at - now) * 1000)
        waited_ms = round((now - flight.waiters[0].accepted_at) * 1000)
        flight.publications += 1
        record_as = record_name(flight.key.tenant, flight.key.key) if flight.key and self._queue.shared else ""
        return Job(
            flight.id,
            flight.payload,
            max(0, remaining_ms),
            self._queue.name,
            flight.needs,
            flight.publications,
            record_as,
            waited_ms,
            self.waiting.weight_of(flight.tenant),
        )

    def _take_back(self, flights: list[Flight]) -> None:
        """The queue may or may not have these; they are published again, and the first answer wins."""
        for flight in flights:
            if flight.cancelled:
                self._never_ran(flight)
        self._publish_again([flight for flight in flights if flight in self.released])

    def _publish_again(self, flights: list[Flight]) -> None:
        again = []
        for flight in flights:
            self.released.remove(flight)
            flight.released = False
            if flight.publications < MAX_STARTS:
                again.append(flight)
                continue
            for waiter in list(flight.waiters):
                words = "the queue lost this call again and again; its program may have been started every time"
                self._give_up(waiter, verdict("worker_lost", starts=MAX_STARTS, error=words))
        self.waiting.put_back(again)
        self._work.set()

    async def _reconcile_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._reconcile()
            except QueueUnavailable as away:
                self.queue_is(str(away))

    async def _reconcile(self) -> None:
        """Publish again what the queue does not have any more and nobody has answered."""
        released_before = self._clock() - (FORGOTTEN_S if self._is_forgetful() else RECONCILE_S)
        old = {flight.id: flight for flight in self.released.before(released_before) if not flight.cancelled}
        if not old:
            return
        lost = [old[id] for id in await self._queue.missing(list(old)) if old[id] in self.released]
        if lost:
            log.warning("%d calls were lost by the queue and are published again", len(lost))
            self._metrics.republished(len(lost))
            self._publish_again(lost)

    def _is_forgetful(self) -> bool:
        """The queue was found to have lost everything so recently that something may still be missing."""
        if self._queue.forgotten > self._forgotten:
            self._forgotten, self._forgetful_until = self._queue.forgotten, self._clock() + RECONCILE_S
        return self._clock() < self._forgetful_until

    async def _send_cancels(self) -> None:
        ids, self._to_cancel = self._to_cancel, []
        if not ids:
            return
        try:
            untaken = await self._queue.cancel(ids)
        except BaseException:  # also when this task is cancelled: they are sent again, which harms nobody
            self._to_cancel = ids + self._to_cancel
            raise
        for id in untaken:
            flight = self._waiters.find(id)
            if flight is not None and flight.cancelled:
                self._never_ran(flight)

    def _never_ran(self, flight: Flight) -> None:
        """A cancelled flight for which no worker will answer."""
        for waiter in list(flight.waiters):
            self._give_up(waiter, verdict("cancelled"))

    # -- life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        start = self._supervisor.start
        self._tasks = [start("answers", self._waiters.read_forever), start("release", self._release_forever)]
        if self._queue.shared:  # else it cannot lose anything, and nobody asks
            self._tasks += [start("reconcile", self._reconcile_forever), start("asks", self._serve_asks_forever)]

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing, wait for what is inside, answer what is left when the time is over."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_empty()
        except TimeoutError:
            self._answer_the_rest()

    async def stop(self) -> None:
        self.draining = True
        if self._cancelling:  # while the tasks live that they need
            await asyncio.wait(self._cancelling, timeout=LAST_CANCELS_S)
        self._answer_the_rest()
        await stop(self._tasks)
        self._tasks = []
        self._deadlines.close()
        try:
            async with asyncio.timeout(LAST_CANCELS_S):
                await self._send_last_cancels()
        except Exception:
            log.exception("cannot cancel %d calls at the queue; workers end them at their deadlines", len(self._to_cancel))

    async def _send_last_cancels(self) -> None:
        while self._to_cancel:
            try:
                await self._send_cancels()
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _until_empty(self) -> None:
        while self._orders or self._rooms:
            self._emptied.clear()
            await self._emptied.wait()

    def _answer_the_rest(self) -> None:
        self._stopping = True
        for flight in self._waiters.flights():
            for waiter in list(flight.waiters):
                self._give_up(waiter, _shut_down())


def _permitted(calls: Sequence[Call], account: Account, *, reserved: bool, lower: bool) -> Sequence[Call]:
    """The calls as the tenant's own. Those of a reservation were looked at when it was made, or came through a door for other
    services' clients, who cannot say all limits: theirs are lowered to what the key allows."""
    if reserved:
        return [account.own(account.lowered(call) if lower else call) for call in calls]
    permitted = [account.permit(call, index) for index, call in enumerate(calls)]
    account.check(len(calls))  # after that: what is never allowed is not told to come again
    return permitted


def bulk_window(window: int) -> int:
    return window - 1 if window > 1 else window


def portions(flights: list[Flight]) -> Iterator[tuple[int, list[Flight]]]:
    """In parts of at most about `BYTES_AT_ONCE`, each with its position."""
    start = size = 0
    for position, flight in enumerate(flights):
        if size > BYTES_AT_ONCE:
            yield start, flights[start:position]
            start, size = position, 0
        size += len(flight.payload)
    yield start, flights[start:]


def _shut_down() -> Result:
    return verdict("internal_error", error="the service shut down before the call was finished")


def read_result(answer: Answer) -> Result:
    try:
        return unpack_result(answer.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        log.error("an answer cannot be read", extra={"call": answer.id})
        return verdict("internal_error", error="the worker's answer could not be read")
