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
_PYTHON = frozenset({"python"})  # for a worker that has not announced its classes


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


class MemoryQueue:
    """The shared middle; `gateway()` and `worker()` give the two ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Job, float]] = deque()  # a job and when its deadline passes
        self._arrival = asyncio.Condition()
        self._leases: dict[str, _Lease] = {}
        self._deadlines: dict[str, float] = {}  # of leased jobs, for a second delivery
        self._replies: dict[str, _Inbox[Answer]] = {}
        self._cancels: dict[str, _Inbox[str]] = {}
        self._directed: dict[str, _Inbox[Job]] = {}
        self._workers: dict[str, tuple[WorkerInfo, float]] = {}
        self._classes: dict[str, frozenset[str]] = {}  # what each worker takes
        self._left: set[str] = set()  # workers that deregistered; one may still call `take`

    def gateway(self, name: str) -> MemoryGatewayEnd:
        self._replies[name] = _Inbox()
        return MemoryGatewayEnd(self, name)

    def worker(self, name: str) -> MemoryWorkerEnd:
        self._cancels[name] = _Inbox()
        self._directed[name] = _Inbox()
        self._left.discard(name)
        return MemoryWorkerEnd(self, name)

    async def _publish(self, jobs: Sequence[Job]) -> None:
        now = self._clock()
        async with self._arrival:
            self._waiting.extend((job, now + job.remaining_ms / 1000) for job in jobs)
            self._arrival.notify_all()

    async def _take(self, worker: str, most: int, wait: bool) -> list[Job]:
        async with self._arrival:
            while True:
                self._return_expired()
                if worker not in self._left and (jobs := self._lease_next(worker, most)):
                    return jobs
                if not wait:
                    return []
                try:
                    await asyncio.wait_for(self._arrival.wait(), self._until_next_expiry())
                except TimeoutError:
                    pass

    def _lease_next(self, worker: str, most: int) -> list[Job]:
        classes = self._classes.get(worker, _PYTHON)
        jobs: list[Job] = []
        passed: list[tuple[Job, float]] = []
        while self._waiting and len(jobs) < most:
            job, deadline = self._waiting.popleft()
            if job.needs in classes:
                jobs.append(self._lease(worker, job, deadline))
            else:
                passed.append((job, deadline))
        self._waiting.extendleft(reversed(passed))
        return jobs

    def _lease(self, worker: str, job: Job, deadline: float) -> Job:
        now = self._clock()
        remaining_ms = round((deadline - now) * 1000)
        waited_ms = job.waited_ms + max(0, job.remaining_ms - remaining_ms)
        job = msgspec.structs.replace(job, remaining_ms=remaining_ms, waited_ms=waited_ms)
        self._leases[job.id] = _Lease(job, worker, now + LEASE_S)
        self._deadlines[job.id] = deadline
        return job

    def _return_expired(self, of_worker: str = "") -> None:
        """Put jobs with expired leases, or all jobs of a leaving worker, at the head of the queue."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.ends_at <= now or lease.worker == of_worker:
                del self._leases[lease.job.id]
                again = msgspec.structs.replace(lease.job, deliveries=lease.job.deliveries + 1)
                self._waiting.appendleft((again, self._deadlines.pop(lease.job.id)))

    def _until_next_expiry(self) -> float | None:
        if not self._leases:
            return None
        return max(0.01, min(lease.ends_at for lease in self._leases.values()) - self._clock())

    def _renew(self, worker: str, ids: Sequence[str]) -> None:
        for id in ids:
            lease = self._leases.get(id)
            if lease is not None and lease.worker == worker:
                lease.ends_at = self._clock() + LEASE_S

    def _answer(self, reply_to: dict[str, str], answers: Sequence[Answer]) -> None:
        for answer in answers:
            lease = self._leases.pop(answer.id, None)
            self._deadlines.pop(answer.id, None)
            inbox = self._replies.get(reply_to.pop(answer.id, lease.job.reply_to if lease else ""))
            if inbox is not None:
                inbox.put([answer])

    def _cancel(self, ids: Sequence[str]) -> list[str]:
        gone = set(ids)
        waiting = [job for job, _ in self._waiting if job.id in gone]
        self._waiting = deque(entry for entry in self._waiting if entry[0].id not in gone)
        for id in gone:
            # Without a lease the job is not started again; the worker may still answer it.
            lease = self._leases.pop(id, None)
            if lease is not None:
                del self._deadlines[id]
                self._cancels[lease.worker].put([id])
        # A worker whose lease expired may still run a job that waits again.
        expired = [job.id for job in waiting if job.deliveries > 1]
        for worker in self._cancels.keys() - self._left:
            self._cancels[worker].put(expired)
        return [job.id for job in waiting]

    def _missing(self, ids: Sequence[str]) -> list[str]:
        waiting = {job.id for job, _ in self._waiting}
        return [id for id in ids if id not in waiting and id not in self._leases]

    async def _leave(self, worker: str) -> None:
        async with self._arrival:
            self._workers.pop(worker, None)
            self._left.add(worker)
            self._return_expired(of_worker=worker)
            self._arrival.notify_all()

    def _alive(self) -> list[WorkerInfo]:
        now = self._clock()
        return [info for info, until in self._workers.values() if until > now]


class MemoryGatewayEnd:
    shared = False
    forgotten = 0

    def __init__(self, queue: MemoryQueue, name: str) -> None:
        self._queue, self.name = queue, name
        self.unreadable: Counter[str] = Counter()  # nothing here is packed

    async def announce(self, backlog: bool, tenants: Mapping[str, TenantUse] = NO_USE) -> list[GatewayInfo]:
        return []

    async def publish(self, jobs: Sequence[Job]) -> None:
        await self._queue._publish(jobs)

    async def publish_to(self, worker: str, job: Job) -> None:
        if worker in self._queue._directed and worker not in self._queue._left:
            self._queue._directed[worker].put([job])

    async def receive(self) -> list[Answer]:
        return await self._queue._replies[self.name].take_all()

    async def cancel(self, ids: Sequence[str]) -> list[str]:
        return self._queue._cancel(ids)

    async def missing(self, ids: Sequence[str]) -> list[str]:
        return self._queue._missing(ids)

    async def workers(self) -> list[WorkerInfo]:
        return self._queue._alive()

    async def recorded(self, names: Sequence[str]) -> list[bytes | None]:
        return [None] * len(names)

    async def ask_others(self, selection: Selection) -> int:
        return 0

    async def asked(self) -> list[Ask]:
        return await asyncio.Future()

    async def tell(self, ask: Ask, cancelled: int) -> None:
        raise NotImplementedError("there are no other gateways")

    async def leave(self) -> None:
        self._queue._replies.pop(self.name, None)


class MemoryWorkerEnd:
    def __init__(self, queue: MemoryQueue, name: str) -> None:
        self._queue, self._name = queue, name
        self.unreadable: Counter[str] = Counter()  # nothing here is packed
        self._reply_to: dict[str, str] = {}  # of what this worker runs, also when the lease went to another one

    async def announce(self, info: WorkerInfo) -> None:
        self._queue._workers[self._name] = (info, self._queue._clock() + LEASE_S)
        self._queue._classes[self._name] = frozenset(info.classes)

    async def take(self, most: int, *, wait: bool = True) -> list[Job]:
        jobs = await self._queue._take(self._name, most, wait)
        self._reply_to.update((job.id, job.reply_to) for job in jobs)
        return jobs

    async def take_directed(self) -> list[Job]:
        jobs = await self._queue._directed[self._name].take_all()
        self._reply_to.update((job.id, job.reply_to) for job in jobs)
        return jobs

    async def renew(self, ids: Sequence[str]) -> None:
        self._queue._renew(self._name, ids)
        self._reply_to = {id: self._reply_to[id] for id in ids if id in self._reply_to}

    async def answer(self, answers: Sequence[Answer]) -> None:
        self._queue._answer(self._reply_to, answers)

    async def cancelled(self) -> list[str]:
        return await self._queue._cancels[self._name].take_all()

    async def leave(self) -> None:
        await self._queue._leave(self._name)
