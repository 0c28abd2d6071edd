"""The job queue inside one process: the embedded default, with the same rules as every other (`exec_wire.queue.protocol`).

Both ends live on one event loop. Nothing here survives the process: on one machine the gateway and its worker die together.
One gateway uses it, so it keeps no records for other gateways.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from exec_wire.messages.calls import Selection
from exec_wire.queue.protocol import LEASE_S, NO_USE, Answer, Ask, GatewayInfo, Job, TenantUse, WorkerInfo

T = TypeVar("T")


class _Inbox(Generic[T]):
    """An unbounded mailbox; its one reader takes all items at once."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def put(self, items: Sequence[T]) -> None:
        if items:
            self._items.extend(items)
            self._filled.set()

    async def take_all(self) -> list[T]:
        await self._filled.wait()
        self._filled.clear()
        taken, self._items = self._items, []
        return taken


class _Lease(msgspec.Struct):
    job: Job
    worker: str
    ends_at: float
    deadline: float  # of the job, for a second delivery
    counted: bool  # its start


class MemoryQueue:
    """The shared middle; `gateway()` and `worker()` give the two ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.waiting: deque[tuple[Job, float]] = deque()  # a job and when its deadline passes
        self.arrival = asyncio.Condition()
        self.leases: dict[str, _Lease] = {}
        self.replies: dict[str, _Inbox[Answer]] = {}
        self.cancels: dict[str, _Inbox[str]] = {}
        self.directed: dict[str, _Inbox[Job]] = {}
        self.workers: dict[str, tuple[WorkerInfo, float]] = {}
        self.left: set[str] = set()  # workers that deregistered; one may still call `take`

    def gateway(self, name: str) -> MemoryGatewayEnd:
        self.replies[name] = _Inbox()
        return MemoryGatewayEnd(self, name)

    def worker(self, name: str) -> MemoryWorkerEnd:
        self.cancels[name] = _Inbox()
        self.directed[name] = _Inbox()
        self.left.discard(name)
        return MemoryWorkerEnd(self, name)

    def return_expired(self, of_worker: str = "") -> None:
        """Put jobs with expired leases, or all jobs of a leaving worker, at the head of the queue."""
        now = self.clock()
        for lease in reversed(list(self.leases.values())):
            if lease.ends_at <= now or lease.worker == of_worker:
                self.put_back(lease)

    def put_back(self, lease: _Lease) -> None:
        del self.leases[lease.job.id]
        again = msgspec.structs.replace(lease.job, deliveries=lease.job.deliveries + lease.counted)
        self.waiting.appendleft((again, lease.deadline))


class MemoryGatewayEnd:
    shared = False
    forgotten = 0
    shards = None

    def __init__(self, queue: MemoryQueue, name: str) -> None:
        self._queue, self.name = queue, name
        self.unreadable: Counter[str] = Counter()  # nothing here is packed

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        return []

    async def publish(self, jobs: Sequence[Job]) -> None:
        queue, now = self._queue, self._queue.clock()
        async with queue.arrival:
            queue.waiting.extend((job, now + job.remaining_ms / 1000) for job in jobs)
            queue.arrival.notify_all()

    async def publish_to(self, worker: str, job: Job, pin: str = "") -> None:
        if worker in self._queue.directed and worker not in self._queue.left:
            self._queue.directed[worker].put([job])

    async def receive(self) -> list[Answer]:
        return await self._queue.replies[self.name].take_all()

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        queue, gone = self._queue, set(ids)
        waiting = [job for job, _ in queue.waiting if job.id in gone]
        queue.waiting = deque(entry for entry in queue.waiting if entry[0].id not in gone)
        for id in gone & queue.leases.keys():  # without a lease the job is not started again; the worker may still answer it
            queue.cancels[queue.leases.pop(id).worker].put([id])
        # A worker whose lease expired may still run a job that waits again.
        expired = [job.id for job in waiting if job.deliveries > 1]
        for worker in queue.cancels.keys() - queue.left:
            queue.cancels[worker].put(expired)
        return [job.id for job in waiting]

    async def missing(self, ids: Sequence[str]) -> list[str]:
        there = {job.id for job, _ in self._queue.waiting} | self._queue.leases.keys()
        return [id for id in ids if id not in there]

    async def workers(self) -> list[WorkerInfo]:
        now = self._queue.clock()
        return [info for info, until in self._queue.workers.values() if until > now]

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        return [None] * len(names)

    async def ask_others(self, selection: Selection) -> int:
        return 0

    async def asked(self) -> list[Ask]:
        return await asyncio.Future()

    async def tell(self, ask: Ask, cancelled: int) -> None:
        raise NotImplementedError("there are no other gateways")

    async def leave(self) -> None:
        self._queue.replies.pop(self.name, None)


class MemoryWorkerEnd:
    stranded = 0
    states: Mapping[str, bool] = {}

    def __init__(self, queue: MemoryQueue, name: str) -> None:
        self._queue, self._name = queue, name
        self.unreadable: Counter[str] = Counter()  # nothing here is packed
        self._classes = frozenset({"python"})  # until it announces others
        self._reply_to: dict[str, str] = {}  # of what this worker runs, also when the lease went to another one

    async def announce(self, info: WorkerInfo) -> None:
        self._queue.workers[self._name] = (info, self._queue.clock() + LEASE_S)
        self._classes = frozenset(info.classes)

    async def take(self, most: int, *, hold: int = 0, wait: bool = True) -> list[Job]:
        queue = self._queue
        async with queue.arrival:
            while True:
                queue.return_expired()
                if self._name not in queue.left and (jobs := self._lease_next(most, hold)):
                    return jobs
                if not wait:
                    return []
                now = queue.clock()
                next_expiry = min((lease.ends_at for lease in queue.leases.values()), default=None)
                try:
                    await asyncio.wait_for(queue.arrival.wait(), None if next_expiry is None else max(0.01, next_expiry - now))
                except TimeoutError:
                    pass

    def _lease_next(self, most: int, hold: int) -> list[Job]:
        waiting = self._queue.waiting
        jobs: list[Job] = []
        passed: list[tuple[Job, float]] = []
        while waiting and len(jobs) < most + hold:
            job, deadline = waiting.popleft()
            if job.needs in self._classes:
                jobs.append(self._lease(job, deadline, starts=len(jobs) < most))
            else:
                passed.append((job, deadline))
        waiting.extendleft(reversed(passed))
        return jobs

    def _lease(self, job: Job, deadline: float, starts: bool) -> Job:
        now = self._queue.clock()
        remaining_ms = round((deadline - now) * 1000)
        waited_ms = job.waited_ms + max(0, job.remaining_ms - remaining_ms)
        job = msgspec.structs.replace(job, remaining_ms=remaining_ms, waited_ms=waited_ms)
        self._queue.leases[job.id] = _Lease(job, self._name, now + LEASE_S, deadline, starts)
        self._reply_to[job.id] = job.reply_to
        return job

    async def started(self, ids: Sequence[str]) -> None:
        for lease in self._own_leases(ids):
            lease.counted = True

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        queue = self._queue
        async with queue.arrival:
            leases = self._own_leases(ids)
            for lease in reversed(leases):
                lease.counted = False
                queue.put_back(lease)
            queue.arrival.notify_all()
        return [lease.job.id for lease in leases]

    def _own_leases(self, ids: Sequence[str]) -> list[_Lease]:
        leases = [self._queue.leases[id] for id in ids if id in self._queue.leases]
        return [lease for lease in leases if lease.worker == self._name]

    async def take_directed(self) -> list[Job]:
        jobs = await self._queue.directed[self._name].take_all()
        self._reply_to.update((job.id, job.reply_to) for job in jobs)
        return jobs

    async def renew(self, ids: Sequence[str]) -> None:
        for lease in self._own_leases(ids):
            lease.ends_at = self._queue.clock() + LEASE_S
        self._reply_to = {id: self._reply_to[id] for id in ids if id in self._reply_to}

    async def answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            lease = self._queue.leases.pop(answer.id, None)
            inbox = self._queue.replies.get(self._reply_to.pop(answer.id, lease.job.reply_to if lease else ""))
            if inbox is not None:
                inbox.put([answer])

    async def cancelled(self) -> list[str]:
        return await self._queue.cancels[self._name].take_all()

    async def leave(self) -> None:
        queue = self._queue
        async with queue.arrival:
            queue.workers.pop(self._name, None)
            queue.left.add(self._name)
            queue.return_expired(of_worker=self._name)
            queue.arrival.notify_all()
