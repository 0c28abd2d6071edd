"""Hands jobs to the workers, as many as there is credit for, and cancels those that nobody waits for any more.

Jobs that the queue refused or lost are published again. While the queue is unavailable they wait here.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import NoReturn

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.call_table import CallTable
from exec_service.dispatch.fair_queue import Places
from exec_service.dispatch.tickets import JobState, PendingJob, Ticket
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.telemetry.metrics import Metrics
from exec_wire.messages.calls import MAX_STARTS, Result, verdict
from exec_wire.queue.protocol import FORGOTTEN_S, RECONCILE_S, RENEW_S, GatewayQueue, Job, QueueUnavailable, record_name

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
        self._table, self._queue, self._worker_registry, self._admission, self._metrics = (
            table,
            queue,
            worker_registry,
            admission,
            metrics,
        )
        self._give_up, self._clock = give_up, clock
        self.unavailable_because = ""  # not empty while the queue is unavailable: the reason
        self.to_cancel: list[str] = []  # ids of jobs that nobody waits for
        self._reached = False  # the queue has answered since it was last unavailable
        self._work = asyncio.Event()
        self._forgotten, self._forgetful_until = queue.forgotten, float("-inf")

    def wake(self) -> None:
        """Something waits, or there is more credit, or something is to be cancelled."""
        self._work.set()

    def cancel(self, job: PendingJob) -> None:
        self.to_cancel.append(job.id)
        self._work.set()

    def look_again(self) -> None:
        """The list of workers was read and may have changed, and with it the credit."""
        self._reached = True
        self._work.set()

    def queue_is(self, unavailable_because: str) -> None:
        """Note why the queue is unavailable, or with an empty string that it is available."""
        if unavailable_because and not self.unavailable_because:
            log.warning("%s; %d calls are kept", unavailable_because, self._admission.calls)
        elif self.unavailable_because and not unavailable_because:
            log.warning("job queue available again; %d calls were kept", self._admission.calls)
        self.unavailable_because = unavailable_because
        self._reached = self._reached and not unavailable_because

    async def release_forever(self) -> NoReturn:
        self._work.set()  # after a failure there is work left
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                if self.to_cancel:
                    await self._send_cancels()
                await self._release()
                if self._reached and self.unavailable_because:
                    self.queue_is("")
                continue
            except QueueUnavailable as unavailable:
                self.queue_is(str(unavailable))
            await asyncio.sleep(RETRY_S)
            self._work.set()

    async def _release(self) -> None:
        self._table.deadlines.run_due()  # an overdue job must not be started, even if the loop was late
        while jobs := self._take_by_credit():
            self._table.release(jobs, self._clock())
            for at, part in portions(jobs):
                try:
                    await self._publish(part)
                except BaseException:
                    self._take_back(jobs[at:])
                    raise

    def _take_by_credit(self) -> list[PendingJob]:
        table, worker_registry = self._table, self._worker_registry
        window = worker_registry.window
        credit = window - len(table.released)
        if credit <= 0 or not table.waiting or self._admission.is_full:
            return []
        # Bulk never has the last credit: its jobs may take long, or be lost with a worker.
        window_for, bulk_released = worker_registry.window_for.get, table.bulk_released_of
        bulk = Places(
            max(window - 1, 1) - table.bulk_released, lambda needs: max(window_for(needs, 0) - 1, 1) - bulk_released[needs]
        )
        return table.waiting.take(
            min(RELEASED_AT_ONCE, credit), lambda needs: window_for(needs, 0) - table.released_of[needs], bulk
        )

    async def _publish(self, jobs: list[PendingJob]) -> None:
        messages = [self._message(job) for job in jobs if job in self._table.released]  # others were given up meanwhile
        try:
            await self._queue.publish(messages)
        except QueueUnavailable as unavailable:
            if not unavailable.sent:
                for job in jobs:
                    job.publications -= 1
            raise

    def _message(self, job: PendingJob) -> Job:
        now, first = self._clock(), job.tickets[0]
        deadline_at = first.deadline_at if len(job.tickets) == 1 else job.deadline_at
        job.publications += 1
        return Job(
            job.id,
            job.payload,
            max(0, round((deadline_at - now) * 1000)),
            self._queue.name,
            job.needs,
            job.publications,
            record_name(job.key.tenant, job.key.key) if job.key and self._queue.shared else "",
            round((now - first.accepted_at) * 1000),
            self._table.waiting.weight_of(job.tenant),
        )

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
        self._work.set()

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
            self._metrics.republished(len(lost))
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


def portions(jobs: list[PendingJob]) -> Iterator[tuple[int, list[PendingJob]]]:
    """In parts of at most about `BYTES_AT_ONCE`, each with its position."""
    start = size = 0
    for position, job in enumerate(jobs):
        if size > BYTES_AT_ONCE:
            yield start, jobs[start:position]
            start, size = position, 0
        size += len(job.payload)
    yield start, jobs[start:]
