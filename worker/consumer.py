"""Takes jobs from the queue as slots become free, runs them, and answers each exactly once.

It also holds jobs without having a slot for them, at most one per slot: those that start within milliseconds because programs
are short, and as many as cells of sessions wait. They wait for a slot together with the cells (`worker.slots`). It does not
block on the queue for such jobs, so an idle worker gets them first; what waits for longer than `HOLD_AT_MOST_S` all the same,
and for no cell, is handed back.

A program that was lost with its zygote is started again, at most `MAX_STARTS` times over all workers that had it. A slot is
free when its program has ended: the next job is taken while the answer is being sent. While the queue is unavailable, programs
continue and their results are kept until they can be sent.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn, Self, TypeVar

from exec_wire import MAX_STARTS, Call, Result, pack, unpack_call, verdict
from exec_wire.messages.sessions import Refused, pack_sessions, unpack_order
from exec_wire.queue.early_cancels import EarlyCancels
from exec_wire.queue.protocol import RENEW_S, Answer, Job, QueueUnavailable, WorkerInfo, WorkerQueue
from exec_wire.supervisor import Supervisor, logged, stop
from worker.echo import EchoPool
from worker.pool import Pool, SlotBusy
from worker.sandbox.zygote_client import ZygoteLost
from worker.sessions import Sessions
from worker.slots import Claim

log = logging.getLogger("worker")
T = TypeVar("T")

BUSY_PAUSE_S = 0.02
QUEUE_PAUSE_S = 0.3
HOLD_AT_MOST_S = 0.1  # ten times what a held job should wait
LATE_S = 10.0  # after its deadline a result that could not be sent is dropped


class _HandedBack(Exception):
    """Another worker runs the job, or this one again later."""


class Consumer:
    def __init__(
        self,
        name: str,
        pool: Pool | EchoPool,
        queue: WorkerQueue,
        sessions: Sessions | None = None,
        supervisor: Supervisor | None = None,
        *,
        near: bool = False,
    ) -> None:
        """`near`: the queue is in this process, so a job is here at once and none is held for its way."""
        self._near = near
        self._name, self._pool, self._queue, self._sessions = name, pool, queue, sessions
        self._supervisor = supervisor or Supervisor()
        self._slot_of: dict[str, int] = {}
        self._held: set[str] = set()  # jobs that were taken and wait for a slot
        self._directed: dict[str, asyncio.Task[None]] = {}  # requests to sessions
        self._running: dict[str, asyncio.Task[None]] = {}
        self._killable: set[str] = set()  # jobs that have begun, have not ended, and were not cancelled
        self._cancelled: EarlyCancels[str] = EarlyCancels()  # also jobs of other workers and jobs that arrive later
        self.queue_unavailable = False
        self.answered: Counter[tuple[str, str]] = Counter()  # by status and blame
        self.taken = self.taken_again = 0  # taken_again: had been delivered before, here or elsewhere
        self.unreadable = queue.unreadable  # entries of the queue, by kind
        self.started_again = 0  # programs started again here because their zygote was lost
        self._wake = asyncio.Event()
        pool.on_change = self._wake.set
        self._background: list[asyncio.Task[None]] = []
        self.draining = False

    async def __aenter__(self) -> Self:
        await self._announce()
        start = self._supervisor.start
        self._take_task = start("take", self._take_forever)
        self._background = [
            start("renew", self._renew_forever),
            start("cancel", lambda: self._handle_each(self._queue.cancelled, self._cancel)),
        ]
        if self._sessions is not None:
            handle = partial(self._start_directed, self._sessions)
            self._background.append(start("directed", lambda: self._handle_each(self._queue.take_directed, handle)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(patience_s=0)
        await stop(self._background)
        await self._queue.leave()

    async def drain(self, patience_s: float) -> None:
        """Stop taking jobs; finish those that run, or hand them back after `patience_s`."""
        self.draining = True
        self._take_task.cancel()
        if patience_s > 0:
            await self._announce()  # no slots
        await self._hand_back_held()
        running = [*self._running.values(), *self._directed.values()]
        if running and patience_s > 0:
            await asyncio.wait(running, timeout=patience_s)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _hand_back_held(self) -> None:
        tasks = [self._running[id] for id in await self._hand_back(list(self._held)) if id in self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _hand_back(self, ids: list[str]) -> list[str]:
        try:
            return await self._queue.hand_back(ids) if ids else []
        except QueueUnavailable as away:
            log.warning("%s; %d held jobs were not handed back", away, len(ids))
            return []

    @property
    def shard_states(self) -> Mapping[str, bool]:
        return self._queue.states

    @property
    def cannot_take_because(self) -> str:
        """The reason why no slots are announced, or empty."""
        if self.draining:
            return "draining: running calls are finished, no more are taken"
        if not self._pool.alive:
            return "the runner is not running"
        return "the task that takes jobs fails; the log says why" if self._supervisor.is_failing("take") else ""

    async def _take_forever(self) -> NoReturn:
        self._wake.set()  # after a failure jobs may be waiting
        while True:
            await self._wake.wait()
            self._wake.clear()
            slots, free = self._pool.slots, self._pool.free_slots
            room = self._room(free, 2 * slots)
            hold = self._room(self._more_to_hold(), 3 * slots - room) if room or not free else 0
            if not room and not hold:
                continue
            try:
                jobs = await self._queue.take(room, hold=hold, wait=room > 0)
            except QueueUnavailable as away:
                self._wake.set()
                await self._pause_for_queue(away)
                continue
            if self.queue_unavailable:
                self.queue_unavailable = False
                log.warning("job queue available again")
            for job in jobs:
                self._start(job)
            if self._pool.free_slots:
                self._wake.set()

    def _room(self, wanted: int, most: int) -> int:
        """`most`: jobs that this worker has at once, so that there are no more unsent answers than slots."""
        return max(0, min(wanted, most - len(self._running) + self._queue.stranded))

    def _more_to_hold(self) -> int:
        """As many as cells wait; and when half of those are used up that would start soon, several together."""
        pool, held, to_hold = self._pool, len(self._held), self._to_hold
        most = to_hold if 2 * held <= to_hold else 0
        return max(0, max(min(pool.cells_waiting, pool.slots), most) - held)

    @property
    def _to_hold(self) -> int:
        return 0 if self._near else self._pool.to_hold

    def _start(self, job: Job) -> None:
        self.taken += 1
        self.taken_again += job.deliveries > 1
        if job.id in self._running:
            return  # it was published twice, or its lease expired while this process was stopped
        if self._pool.free_slots:
            self._slot_of[job.id] = self._pool.take_slot()
        else:
            self._held.add(job.id)
        task = self._running[job.id] = asyncio.create_task(self._work(job))
        task.add_done_callback(lambda _: self._ended(job.id))
        logged(task, "a job was not answered")

    async def _pause_for_queue(self, away: QueueUnavailable) -> None:
        if not self.queue_unavailable:
            log.warning("%s; running programs continue", away)
        self.queue_unavailable = True
        await asyncio.sleep(QUEUE_PAUSE_S)

    def _ended(self, id: str) -> None:
        del self._running[id]
        self._held.discard(id)
        self._give_back_slot(id)
        self._wake.set()

    def _give_back_slot(self, id: str) -> None:
        if (slot := self._slot_of.pop(id, None)) is not None:
            self._pool.give_back(slot)

    async def _work(self, job: Job) -> None:
        received, had_slot_at = time.monotonic(), None
        try:
            self._killable.add(job.id)
            if job.id in self._cancelled:
                result = verdict("cancelled")
            else:
                call = unpack_call(job.payload)
                if job.id in self._held:
                    await self._hold(job, call, received)
                had_slot_at = time.monotonic()
                result = await self._run(job, call, received)
        except asyncio.CancelledError:
            if self.draining and job.id not in self._cancelled:
                raise  # the lease is handed back, another worker runs it
            result = verdict("cancelled")
        except _HandedBack:
            return
        except TimeoutError:
            result = _expired()
        except Exception as error:  # the outermost handler: every job is answered
            log.exception("a call failed inside the worker")
            result = verdict("internal_error", error=f"{type(error).__name__} in the worker")
        finally:
            self._killable.discard(job.id)
        self._give_back_slot(job.id)
        result.worker = self._name
        record = result.blame != "infra" and result.status != "cancelled"
        await self._send(job, received, had_slot_at, pack(result), record=record)
        self.answered[result.status, result.blame] += 1

    async def _send(self, job: Job, received: float, since: float | None, payload: bytes, record: bool = False) -> None:
        answer = Answer(job.id, payload, (time.monotonic() - since) * 1000 if since is not None else 0.0, record)
        await self._insist(job, received, lambda: self._queue.answer([answer]))

    async def _insist(self, job: Job, received: float, ask: Callable[[], Awaitable[None]]) -> None:
        """Ask the queue, again while it is unavailable."""
        while True:
            try:
                return await ask()
            except QueueUnavailable:  # maybe only its server: whether the queue is unavailable shows when jobs are taken
                if time.monotonic() > received + job.remaining_ms / 1000 + LATE_S:
                    raise
                await asyncio.sleep(QUEUE_PAUSE_S)

    async def _hold(self, job: Job, call: Call, received: float) -> None:
        """Wait for a slot. `TimeoutError` if the deadline passes before."""
        claim = Claim(call.tenant, call.priority, job.weight, received - job.waited_ms / 1000)
        deadline = received + job.remaining_ms / 1000
        while job.id not in self._slot_of:
            until = min(deadline, time.monotonic() + HOLD_AT_MOST_S)
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    self._slot_of[job.id] = await self._pool.next_slot(claim)
            except TimeoutError:
                if until == deadline:
                    raise
                if not self._pool.cells_waiting and await self._hand_back([job.id]):
                    raise _HandedBack from None
                claim = replace(claim, slot=asyncio.get_running_loop().create_future())
        self._held.discard(job.id)
        await self._insist(job, received, lambda: self._queue.started([job.id]))

    async def _run(self, job: Job, call: Call, received: float) -> Result:
        slot = self._slot_of[job.id]
        starts = job.deliveries - 1  # by workers that were lost
        while True:
            remaining_s = job.remaining_ms / 1000 - (time.monotonic() - received)
            if starts >= MAX_STARTS:
                return verdict("worker_lost", starts=starts, error="every worker that started this program was lost")
            if remaining_s <= 0:
                return _expired()
            try:
                return await self._pool.run(call, slot, remaining_s)
            except ZygoteLost:
                starts += 1
                self.started_again += 1
            except SlotBusy:
                await asyncio.sleep(BUSY_PAUSE_S)
            except TimeoutError:
                return verdict("expired", error="no warm interpreter before the deadline")

    async def _handle_each(self, take: Callable[[], Awaitable[list[T]]], handle: Callable[[T], None]) -> NoReturn:
        while True:
            try:
                items = await take()
            except QueueUnavailable as away:
                await self._pause_for_queue(away)
                continue
            for item in items:
                handle(item)

    def _start_directed(self, sessions: Sessions, job: Job) -> None:
        """A request to a session: taking one needs no slot, and none is run twice."""
        task = self._directed[job.id] = asyncio.create_task(self._handle_directed(sessions, job))
        task.add_done_callback(lambda _: self._directed.pop(job.id))
        logged(task, "a session's answer was not sent")

    async def _handle_directed(self, sessions: Sessions, job: Job) -> None:
        received = time.monotonic()
        try:
            reply = await sessions.handle(unpack_order(job.payload), job.remaining_ms / 1000)
        except Exception as error:  # the outermost handler
            log.exception("a session failed inside the worker")
            reply = Refused("internal", f"{type(error).__name__} in the worker")
        await self._send(job, received, received, pack_sessions(reply))

    async def _renew_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._queue.renew([*self._running, *self._directed])
            except QueueUnavailable as away:
                await self._pause_for_queue(away)
                continue
            if not self.draining:  # while draining the gateways see this worker leave
                await self._announce()

    async def _announce(self) -> None:
        try:
            await self._queue.announce(self._info())
        except QueueUnavailable as away:
            await self._pause_for_queue(away)

    def _cancel(self, id: str) -> None:
        """Kill the job, or remember not to start it. A task that has not begun must not be cancelled: it would end without an
        answer. Nor must a task be cancelled twice: it waits for the death of its program."""
        self._cancelled.add(id)
        if id in self._killable:
            self._killable.discard(id)
            self._running[id].cancel()

    def _info(self) -> WorkerInfo:
        pool = self._pool
        return WorkerInfo(
            self._name,
            0 if self.cannot_take_because else pool.slots,
            pool.slots - pool.free_slots,
            needs=pool.languages,
            tier=pool.sandbox.tier,
            layers=pool.sandbox.layers,
            profiles=pool.profiles,
            missing_layers=list(pool.missing),
            sessions=self._sessions.live if self._sessions else 0,
            max_sessions=self._sessions.most if self._sessions and pool.alive and not self.draining else 0,
            session_memory_bytes=self._sessions.memory_bytes if self._sessions else 0,
            session_counts=dict(self._sessions.counts) if self._sessions else {},
            holds=0 if self.cannot_take_because else self._to_hold,
        )


def _expired() -> Result:
    return verdict("expired", error="the deadline passed before the program started")
