"""The life of a call, from admission to its result: `Dispatch.run` and, below it, the tasks that it relies on.

Knows no HTTP: every endpoint decodes calls, runs them with `run`, and encodes their results. There is no task per call: one
task reads answers, one releases jobs, one looks for jobs that the queue has lost, and one timer watches all deadlines.

While the queue is unavailable, accepted calls are kept and published later; new calls are accepted while there is room.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

import msgspec

from exec_service.config import GatewayConfig
from exec_service.dispatch.admission import Admission, Reservation
from exec_service.dispatch.call_table import CallTable
from exec_service.dispatch.cancellation import Cancellation
from exec_service.dispatch.deadlines import Deadlines
from exec_service.dispatch.fair_queue import FairQueue
from exec_service.dispatch.idempotency import Idempotency, PayloadDiffers, Record
from exec_service.dispatch.release import RETRY_S, Release
from exec_service.dispatch.requests import ANONYMOUS, CallRequest, Origin
from exec_service.dispatch.tickets import JobState, Key, PendingJob, Ticket
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.refusals import NotPermitted, Overloaded, Refusal
from exec_service.telemetry.metrics import Metrics
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Call, Result, Tags, unpack_result, verdict
from exec_wire.queue.protocol import Answer, GatewayQueue, QueueUnavailable, class_of, record_name
from exec_wire.supervisor import Supervisor, stop

log = logging.getLogger("exec_service.dispatch")

LAST_CANCELS_S = 3.0  # at a stop, for cancellations that are not sent yet
LOOK_UP_S = 1.0  # for the records of other gateways; a call that waits longer for them is run
EARLY_S = 1.0  # a worker that finds a call late by more than this before its deadline was told a wrong time
_pack_sorted = msgspec.msgpack.Encoder(order="deterministic").encode  # the order of `files` and `env` says nothing
_NO_TAGS = Tags()
FINGERPRINT_BYTES = 16  # of a record, before its result
_UNTIMED_S = 60.0  # the default of `Call.deadline_s`, which packing leaves out


# A worker gets everything but these, and calls that differ only in these are the same.
_NOT_SENT = {"id": "", "deadline_s": _UNTIMED_S, "tags": _NO_TAGS, "idempotency_key": ""}
_with = msgspec.structs.replace


class Dispatch:
    def __init__(
        self,
        config: GatewayConfig,
        queue: GatewayQueue,
        worker_registry: WorkerRegistry,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        weight_of: Callable[[str], float] | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self._supervisor = supervisor or Supervisor()
        self._config, self._queue, self._worker_registry = config, queue, worker_registry
        self._metrics, self._clock = metrics, clock
        arriving = max(config.max_bytes // 2, config.max_body_bytes)  # the rest is for requests that come in one piece
        self.admission = Admission(config.max_calls, config.max_bytes, config.retry_after_max_s, clock, arriving)
        self.table = CallTable(
            FairQueue(weight_of),
            Idempotency(config.idempotency_ttl_s, config.idempotency_max_bytes, clock),
            Deadlines(self._supervisor.guarded("deadlines", self._overdue), clock),
        )
        self.waiting, self.released = self.table.waiting, self.table.released
        self._cancellation = Cancellation(self.table, queue, self._cancel, clock)
        self.cancel = self._cancellation.cancel
        self.release = Release(self.table, queue, worker_registry, self.admission, metrics, self._give_up, clock)
        self.admission.on_room = self.release.work.set
        self.draining, self.draining_because = False, ""  # the reason if nobody asked for it
        self.not_ready_because = ""  # not empty while nothing can be run here: the reason
        self._asked: dict[str, asyncio.Future[Answer]] = {}  # jobs for one worker that are no calls, by id
        self._rooms: set[Reservation] = set()  # of requests that make their calls one by one
        self._stopping = False
        self._emptied = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Ids of a restarted gateway must differ from those of its former self, which may still be answered.
        self._ids = (f"{prefix}-{number:x}" for prefix in [secrets.token_hex(6)] for number in itertools.count())

    # -- the life of a call -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def run(
        self,
        calls: Sequence[Call],
        origin: Origin = ANONYMOUS,
        field: str = "$",
        *,
        room: Reservation | None = None,
        expecting: bool = False,
    ) -> AsyncIterator[CallRequest]:
        """Run the calls of one request. The block reads their results (`CallRequest.take`); leaving it cancels the rest.

        Args:
            field: the path of a call, with {} for its index, for a `Refusal` of all of the calls.
            room: the calls are admitted already.
            expecting: more calls `join` the request later.
        """
        if self._queue.shared:
            await self.look_up(calls, origin)  # results that other gateways recorded for the same idempotency keys
        request = CallRequest(origin, self.admission, self._metrics, self._clock, expecting)
        requests = self.table.requests.setdefault(origin.request_id, set())
        requests.add(request)
        try:
            self.accept(request, calls, field, room=room)  # admission, idempotency, tickets, a place in the fair queue
            # `Release` hands jobs to the workers by credit; `_read_answers_forever` records and delivers their results.
            yield request
        finally:  # the caller has everything or is gone: cancel what is pending and give back the rest
            request.closed = True
            for ticket in request.pending:
                self._metrics.finished(verdict("cancelled"), origin.adapter, ticket.tenant, ticket.tags, answered=False)
                self._leave(ticket)
            request.pending.clear()
            self.admission.give_back(request.calls, request.bytes)
            if origin.account is not None:
                origin.account.give_back(request.calls)
            requests.discard(request)
            if not requests:
                del self.table.requests[origin.request_id]
            self._emptied.set()

    async def join(self, request: CallRequest, calls: Sequence[Call], first_index: int, field: str) -> None:
        """As `run`, for more calls of a request that is expecting them."""
        await self.look_up(calls, request.origin)
        self.accept(request, calls, field, first_index=first_index)

    async def look_up(self, calls: Sequence[Call], origin: Origin) -> None:
        """Learn the results of other gateways' calls with the same keys."""
        if not self._queue.shared or self.away_because:
            return
        keys = {Key(origin.tenant_of(call), call.idempotency_key) for call in calls if call.idempotency_key}
        unknown = [key for key in keys if not self.table.idempotency.knows(key)]
        if not unknown:
            return
        try:
            async with asyncio.timeout(LOOK_UP_S):
                found = await self._queue.recorded([record_name(key.tenant, key.key) for key in unknown])
        except (QueueUnavailable, TimeoutError):
            return  # the call runs again, which nobody can tell
        for key, record in zip(unknown, found, strict=True):
            if record is not None:
                self.table.idempotency.adopt(key, record[:FINGERPRINT_BYTES], record[FINGERPRINT_BYTES:])

    def accept(
        self, request: CallRequest, calls: Sequence[Call], field: str, *, room: Reservation | None = None, first_index: int = 0
    ) -> None:
        """Take responsibility for all of `calls`, or raise a `Refusal` and for none of them."""
        admission, account, table, count = self.admission, request.origin.account, self.table, len(calls)
        if room is None:
            if self.draining or self.not_ready_because:
                self.check_open()
            if admission.calls + count > admission.max_calls:  # before the work of packing
                self._refuse(count, 0)
        if account is not None and calls:
            calls = _permitted(calls, account, field, reserved=room is not None, lower=bool(request.origin.adapter))
        programs = [_pack_sorted(_with(call, **_NOT_SENT)) for call in calls]
        bytes_ = sum(map(len, programs))
        if [call for call in calls if call.idempotency_key]:
            self._check_keys(calls, programs, field)
        if room is not None:
            room.use(count, bytes_)
        elif admission.calls + count > admission.max_calls or admission.bytes + bytes_ > admission.max_bytes:
            self._refuse(count, bytes_)
        if account is not None:
            (account.take_up if room is None else account.charge)(count)
        admission.calls += count
        admission.bytes += bytes_
        request.calls, request.bytes, now = request.calls + count, request.bytes + bytes_, self._clock()
        for index, (call, program) in enumerate(zip(calls, programs, strict=True), first_index):
            ticket = Ticket(request, index, call.id, now, now + call.deadline_s, len(program), call.tags, call.tenant)
            request.pending.add(ticket)
            key = Key(call.tenant, call.idempotency_key) if call.idempotency_key else None
            known = table.idempotency.find(key, program) if key is not None else None
            if self._stopping:
                request.deliver(ticket, _shut_down(), 0)
            elif isinstance(known, Record):
                request.deliver(ticket, unpack_result(known.payload), len(known.payload))
            elif known is not None:
                table.join(known, ticket)
            else:  # indexed before it is released: a fast worker may answer at once
                needs = class_of(call.language, call.require_tier)
                job = PendingJob(next(self._ids), program, needs, key, call.priority, call.tenant, tickets=[ticket])
                ticket.job = table.jobs[job.id] = job
                if key is not None:
                    table.idempotency.start(job)
                table.waiting.put(job)
                ticket.due = table.deadlines.set(ticket, ticket.deadline_at)
            if self._cancellation.early and self._cancellation.was_early(ticket):
                self._cancel(ticket)
        self.release.work.set()

    def _check_keys(self, calls: Sequence[Call], programs: list[bytes], field: str) -> None:
        """A key stands for one program, also within a request."""
        here: dict[Key, bytes] = {}
        for index, (call, program) in enumerate(zip(calls, programs, strict=True)):
            if not call.idempotency_key:
                continue
            key = Key(call.tenant, call.idempotency_key)
            try:
                self.table.idempotency.find(key, program)
                if here.setdefault(key, program) != program:
                    raise PayloadDiffers
            except PayloadDiffers:
                at = f"{field.format(index)}.idempotency_key"
                raise Refusal("idempotency_conflict", "the key was used for a call with another payload", field=at) from None

    async def _read_answers_forever(self) -> NoReturn:
        while True:
            try:
                answers = await self._queue.receive()
            except QueueUnavailable as unavailable:
                self.release.queue_is(str(unavailable))
                await asyncio.sleep(RETRY_S)
                continue
            for answer in answers:
                try:
                    self._answered(answer)
                except Exception as error:  # answers come once: a failure at one must not lose the others
                    self._supervisor.failed("answers", error)

    def _answered(self, answer: Answer) -> None:
        """The first answer to a job ends it: record its result and deliver it to every ticket."""
        asked = self._asked.get(answer.id)
        if asked is not None:
            return None if asked.done() else asked.set_result(answer)
        job = self.table.jobs.get(answer.id)
        if job is None:
            self._metrics.late_answers.counts[()] += 1
            return None
        try:
            result = unpack_result(answer.payload)
        except (msgspec.DecodeError, UnicodeDecodeError):
            result = read_result(answer)  # says that it cannot be read
        if result.status == "expired" and self._is_early(job):
            return self.release.publish_again([job] if job.state is JobState.RELEASED else [])
        if job.publications > 1:
            self.release.cancel(job)  # the other copy
        if job.state is JobState.CANCELLING:
            if result.status != "cancelled":
                result = verdict("cancelled")  # it ended before the kill arrived; its caller was told that it is cancelled
        elif job.key is not None:
            self.table.idempotency.finish(job, answer.payload, result.blame)
        for position, ticket in enumerate(self.table.finish(job)):
            own = read_result(answer) if position else result
            ticket.request.deliver(ticket, own, len(answer.payload), answer.stay_ms)
        self.release.work.set()

    def _is_early(self, job: PendingJob) -> bool:
        """Only the clock of the queue's server can have jumped: ours says that there is time left."""
        return self._queue.shared and not job.cancelling and self._clock() < job.deadline_at - EARLY_S

    # -- admission --------------------------------------------------------------------------------------------------------

    @property
    def away_because(self) -> str:
        """Not empty while the queue is unavailable: the reason."""
        return self.release.unavailable_because

    @property
    def window(self) -> int:
        """How many jobs can be with the workers at once."""
        return self._worker_registry.window

    @property
    def oldest_wait_s(self) -> float:
        """How long the job that has waited longest for credit has waited."""
        job = self.table.oldest_waiting()
        return self._clock() - job.tickets[0].accepted_at if job is not None else 0.0

    def check_open(self) -> None:
        """Raise a `Refusal` if no call would be accepted, whatever it is."""
        if self.draining:
            why = f": {self.draining_because}" if self.draining_because else ""
            raise Refusal("draining", f"the service finishes accepted calls and admits no new ones{why}")
        if self.not_ready_because:
            raise Refusal("not_ready", self.not_ready_because, retry_after_s=self._config.retry_after_max_s)

    def check_ready(self) -> None:
        """Raise a `Refusal` if no call can be kept: while the queue is unavailable, only as many as there is room for."""
        self.check_open()
        if self.away_because:
            self._refuse(1, 0)

    def reserve(self, calls: int, bytes_: int, origin: Origin) -> Reservation:
        """Admit calls that are accepted later, or raise a `Refusal`."""
        self.check_open()
        self._refuse(calls, bytes_)
        room = Reservation(self.admission, origin.account, calls, bytes_, self._vacated)
        self._rooms.add(room)
        return room

    @contextmanager
    def asking(self, id: str) -> Iterator[asyncio.Future[Answer]]:
        """Wait for the answer of one worker to a job that is no call."""
        future = self._asked[id] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._asked[id]

    def _refuse(self, calls: int, bytes_: int) -> None:
        """Raise a `Refusal` if so much does not fit now."""
        try:
            self.admission.check(calls, bytes_)
        except Overloaded as overloaded:
            if not self.away_because:
                raise
            detail = f"{self.away_because}; no more calls can be kept: {overloaded.detail}"
            raise Refusal("not_ready", detail, retry_after_s=overloaded.retry_after_s) from None

    def _vacated(self, room: Reservation) -> None:
        self._rooms.discard(room)
        self._emptied.set()

    # -- deadlines, cancellation ------------------------------------------------------------------------------------------

    def _overdue(self, ticket: Ticket) -> None:
        job = ticket.job
        if job is None:
            if ticket in ticket.request.pending:  # its answer came and could not be delivered
                ticket.request.deliver(ticket, verdict("internal_error", error="the worker's answer could not be delivered"), 0)
            return
        if job.state is JobState.WAITING:
            self._give_up(ticket, verdict("expired", error="the deadline passed while the call waited for a slot"))
        elif not ticket.in_grace:
            # The worker kills by the same deadline; its answer needs a moment.
            ticket.in_grace = True
            self.table.set_deadline(ticket, ticket.deadline_at + self._config.answer_grace_s)
        else:
            self._give_up(ticket, verdict("worker_lost", error="no worker answered by the deadline"))

    def _cancel(self, ticket: Ticket) -> bool:
        job = ticket.job
        if job is None or job.cancelling:
            return False  # answered, left or cancelled by somebody else in the meantime
        if job.state is JobState.RELEASED and len(job.tickets) == 1:
            # The worker kills it. It keeps its credit until the worker answers.
            self.table.start_cancel(job)
            self.release.cancel(job)
            ticket.in_grace = True
            self.table.set_deadline(ticket, self._clock() + self._config.answer_grace_s)
        else:
            self._give_up(ticket, verdict("cancelled"))
        return True

    def _give_up(self, ticket: Ticket, result: Result) -> None:
        """Answer without the worker."""
        cancelling = ticket.job is not None and ticket.job.cancelling
        self._leave(ticket)
        ticket.request.deliver(ticket, verdict("cancelled") if cancelling else result, 0)

    def _leave(self, ticket: Ticket) -> None:
        unwanted = self.table.leave(ticket)
        if unwanted is not None:
            self.release.cancel(unwanted)
        self.release.work.set()

    # -- start and stop ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        start = self._supervisor.start
        self._tasks = [start("answers", self._read_answers_forever), start("release", self.release.release_forever)]
        if self._queue.shared:  # else it cannot lose anything, and nobody asks
            self._tasks.append(start("reconcile", self.release.reconcile_forever))
            self._tasks.append(start("asks", self._cancellation.serve_other_gateways))

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing, wait for what was accepted, answer the rest when the time is over."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.table.requests or self._rooms:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            self._answer_the_rest()

    async def stop(self) -> None:
        self.draining = True
        await self._cancellation.finish(LAST_CANCELS_S)  # while the tasks live that it needs
        self._answer_the_rest()
        await stop(self._tasks)
        self._tasks = []
        self.table.deadlines.close()
        try:
            async with asyncio.timeout(LAST_CANCELS_S):
                await self.release.send_last_cancels()
        except Exception:
            log.exception(
                "cannot cancel %d calls at the queue; workers end them at their deadlines", len(self.release.to_cancel)
            )

    def _answer_the_rest(self) -> None:
        self._stopping = True
        for job in list(self.table.jobs.values()):
            for ticket in list(job.tickets):
                self._give_up(ticket, _shut_down())


def _permitted(calls: Sequence[Call], account: Account, field: str, *, reserved: bool, lower: bool) -> Sequence[Call]:
    """The calls as the tenant's own. Those of a reservation were checked when it was made, or came through an adapter, whose
    clients cannot name all limits: theirs are lowered to what the key allows."""
    if reserved:
        return [account.own(account.lowered(call) if lower else call) for call in calls]
    permitted = []
    for index, call in enumerate(calls):
        try:
            permitted.append(account.permit(call))
        except NotPermitted as refusal:
            refusal.field = field.format(index) + refusal.inside
            raise
    account.check(len(calls))  # after that: a call that is never allowed is not told to come again
    return permitted


def _shut_down() -> Result:
    return verdict("internal_error", error="the service shut down before the call was finished")


def read_result(answer: Answer) -> Result:
    try:
        return unpack_result(answer.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        log.error("an answer cannot be read", extra={"call": answer.id})
        return verdict("internal_error", error="the worker's answer could not be read")
