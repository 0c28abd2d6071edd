"""Hands jobs to the workers, as many as there is credit for, and cancels those that nobody waits for any more.

Jobs that the queue refused or lost are published again. While the queue is unavailable they wait here.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.call_table import CallTable
from exec_service.dispatch.fair_queue import Credit
from exec_service.dispatch.tickets import JobState, PendingJob, Ticket
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.telemetry.metrics import Metrics
from exec_wire.messages.calls import MAX_STARTS, Result, verdict
from exec_wire.queue.protocol import (
    FORGOTTEN_S,
    RECONCILE_S,
    RENEW_S,
    GatewayQueue,
    Job,
    QueueUnavailable,
    Shards,
    ShardsUnavailable,
    record_name,
)

log = logging.getLogger("exec_service.dispatch")

RETRY_S = 0.5
RELEASED_AT_ONCE, BYTES_AT_ONCE = 512, 4 << 20  # in one publication, which is all or nothing


class Release:
    def __init__(
        self,
        table: CallTable,
        queue: GatewayQueue,
        worker_registry: WorkerRegistry,
        admission: Admission,
        metrics: Metrics,
        give_up: Callable[[Ticket, Result], None],
        clock: Callable[[], float],
    ) -> None:
        """`give_up` answers a ticket without a worker."""
        self._table, self._queue, self._worker_registry = table, queue, worker_registry
        self._admission, self._metrics = admission, metrics
        self._give_up, self._clock = give_up, clock
        self.unavailable_because = ""  # not empty while the queue is unavailable: the reason
        self.to_cancel: list[str] = []  # ids of jobs that nobody waits for
        self._reached = False  # the queue has answered since it was last unavailable
        self.work = asyncio.Event()  # something waits, or there is more credit, or something is to be cancelled
        self._forgotten, self._forgetful_until = queue.forgotten, float("-inf")

    def cancel(self, job: PendingJob) -> None:
        self.to_cancel.append(job.id)
        self.work.set()

    def look_again(self) -> None:
        """The list of workers was read and may have changed, and with it the credit."""
        self._reached = True
        if self._queue.shards is not None:
            self._table.waiting.unpark(self._queue.shards.is_open)
        self.work.set()

    def queue_is(self, unavailable_because: str) -> None:
        """Note why the queue is unavailable, or with an empty string that it is available."""
        if unavailable_because and not self.unavailable_because:
            log.warning("%s; %d calls are kept", unavailable_because, self._admission.calls)
        elif self.unavailable_because and not unavailable_because:
            log.warning("job queue available again; %d calls were kept", self._admission.calls)
        self.unavailable_because = unavailable_because
        self._reached = self._reached and not unavailable_because

    async def release_forever(self) -> NoReturn:
        """Publish waiting jobs whenever there is credit for them."""
        table, registry, admission, queue = self._table, self._worker_registry, self._admission, self._queue
        self.work.set()  # after a failure there is work left
        while True:
            await self.work.wait()
            self.work.clear()
            try:
                if self.to_cancel:
                    await self._send_cancels()
                if self._clock() >= table.deadlines.rings_at:  # an overdue job must not be started, even if the loop was late
                    table.deadlines.run_due()
                while table.waiting.count and admission.bytes <= admission.max_bytes:
                    window, window_for, classes = registry.window, registry.window_for, table.waiting.classes
                    released, released_of = len(table.released), table.released_of
                    if queue.shards is not None and queue.shards.stranded:
                        released, released_of = self._in_use(queue.shards)
                    most = min(RELEASED_AT_ONCE, window - released)
                    credit = Credit(most, {needs: window_for.get(needs, 0) - released_of[needs] for needs in classes})
                    # Bulk never has the last credit: its jobs may take long, or be lost with a worker.
                    of_bulk = {needs: max(window_for.get(needs, 0) - 1, 1) - table.bulk_released_of[needs] for needs in classes}
                    bulk = Credit(max(window - 1, 1) - sum(table.bulk_released_of.values()), of_bulk)
                    jobs = list(iter(partial(table.waiting.take, credit, bulk), None))
                    if not jobs:
                        break
                    if queue.shards is not None:
                        jobs = self._park_closed(jobs, queue.shards)
                    table.release(jobs, self._clock())
                    await self._publish(jobs)
                if self._reached and self.unavailable_because:
                    self.queue_is("")
                continue
            except QueueUnavailable as unavailable:
                self.queue_is(str(unavailable))
            await asyncio.sleep(RETRY_S)
            self.work.set()

    def _in_use(self, shards: Shards) -> tuple[int, Counter[str]]:
        """The credit in use: in all, and by class. A job at a server that cannot be used holds none."""
        return len(self._table.released) - shards.stranded.total(), self._table.released_of - shards.stranded

    def _park_closed(self, jobs: list[PendingJob], shards: Shards) -> list[PendingJob]:
        """Those of these jobs that can be published now. The others are set aside."""
        open_jobs = []
        for job in jobs:
            shard = shards.shard_of(job.id, record_of(job))
            if shards.is_open(shard, job.needs):
                open_jobs.append(job)
            else:
                self._table.waiting.park(job, shard)
        return open_jobs

    async def _publish(self, jobs: list[PendingJob]) -> None:
        """In parts, each of which the queue takes or refuses as a whole."""
        queue, waiting = self._queue, self._table.waiting
        for at, part in portions(jobs) if len(jobs) > 1 else ((0, jobs),):
            now, messages = self._clock(), []
            try:
                for job in part:
                    if job not in self._table.released:
                        continue  # it was given up meanwhile
                    job.publications += 1
                    first, times = job.tickets[0], job.publications
                    deadline_at = first.deadline_at if len(job.tickets) == 1 else job.deadline_at
                    left_ms, waited_ms = max(0, round((deadline_at - now) * 1000)), round((now - first.accepted_at) * 1000)
                    record = record_of(job) if queue.shared else ""
                    weight = waiting.weight_of(job.tenant) if waiting.tenant_weight is not None else 1.0
                    message = Job(job.id, job.payload, left_ms, queue.name, job.needs, times, record, waited_ms, weight)
                    messages.append(message)
                await queue.publish(messages)
            except ShardsUnavailable as error:
                failed = [job for job in part if job.id in error.failed]
                for job in failed:
                    job.publications -= not error.failed[job.id]
                self._take_back(failed)
            except BaseException as error:
                if isinstance(error, QueueUnavailable) and not error.sent:
                    for job in part:
                        job.publications -= 1
                self._take_back(jobs[at:])
                raise

    def _take_back(self, jobs: list[PendingJob]) -> None:
        """The queue may or may not have these; they are published again, and the first answer wins."""
        for job in jobs:
            if job.cancelling:
                self._never_ran(job)
        self.publish_again([job for job in jobs if job.state is JobState.RELEASED])

    def publish_again(self, jobs: list[PendingJob]) -> None:
        self._table.take_back([job for job in jobs if job.publications < MAX_STARTS])
        for job in jobs:
            if job.publications >= MAX_STARTS:
                error = "the queue lost this call again and again; its program may have been started every time"
                for ticket in list(job.tickets):
                    self._give_up(ticket, verdict("worker_lost", starts=MAX_STARTS, error=error))
        self.work.set()

    async def _send_cancels(self) -> None:
        ids, self.to_cancel = self.to_cancel, []
        try:
            untaken = await self._queue.cancel(ids)
        except BaseException:  # also when this task is cancelled: they are sent again, which harms nobody
            self.to_cancel = ids + self.to_cancel
            raise
        for id in untaken:
            job = self._table.jobs.get(id)
            if job is not None and job.cancelling:
                self._never_ran(job)

    def _never_ran(self, job: PendingJob) -> None:
        """A cancelled job that no worker will answer."""
        for ticket in list(job.tickets):
            self._give_up(ticket, verdict("cancelled"))

    async def reconcile_forever(self) -> NoReturn:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._reconcile()
            except QueueUnavailable as unavailable:
                self.queue_is(str(unavailable))

    async def _reconcile(self) -> None:
        """Publish again what the queue does not have any more and nobody has answered."""
        old = self._table.released_before(self._clock() - (FORGOTTEN_S if self._is_forgetful() else RECONCILE_S))
        if not old:
            return
        lost = [old[id] for id in await self._queue.missing(list(old)) if old[id].state is JobState.RELEASED]
        if lost:
            log.warning("the queue lost %d calls; they are published again", len(lost))
            self._metrics.republished.counts[()] += len(lost)
            self.publish_again(lost)

    def _is_forgetful(self) -> bool:
        """The queue lost everything so recently that something may still be missing."""
        if self._queue.forgotten > self._forgotten:
            self._forgotten, self._forgetful_until = self._queue.forgotten, self._clock() + RECONCILE_S
        return self._clock() < self._forgetful_until

    async def send_last_cancels(self) -> None:
        while self.to_cancel:
            try:
                await self._send_cancels()
            except QueueUnavailable:
                await asyncio.sleep(RETRY_S)


def record_of(job: PendingJob) -> str:
    return record_name(job.key.tenant, job.key.key) if job.key else ""


def portions(jobs: list[PendingJob]) -> Iterator[tuple[int, list[PendingJob]]]:
    """In parts of at most about `BYTES_AT_ONCE`, each with its position."""
    start = size = 0
    for position, job in enumerate(jobs):
        if size > BYTES_AT_ONCE:
            yield start, jobs[start:position]
            start, size = position, 0
        size += len(job.payload)
    yield start, jobs[start:]
