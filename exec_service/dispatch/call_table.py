"""Every accepted call and every index of it. Each transition of a job is one method, which checks the state it starts from.

    WAITING ──release──▶ RELEASED ──────────────finish──▶ DONE
       ▲                  │   │                             ▲
       └────take_back─────┘   └─start_cancel─▶ CANCELLING ──┤
    WAITING ────────────────────────────────────finish──────┘

A job that was taken back may have reached a worker all the same, so a WAITING job can be answered.
"""

from collections import Counter
from collections.abc import Sequence

from exec_service.dispatch.deadlines import Deadlines
from exec_service.dispatch.fair_queue import FairQueue
from exec_service.dispatch.idempotency import Idempotency
from exec_service.dispatch.requests import CallRequest
from exec_service.dispatch.tickets import JobState, PendingJob, Ticket


class CallTable:
    def __init__(self, waiting: FairQueue, idempotency: Idempotency, deadlines: Deadlines[Ticket]) -> None:
        self.waiting, self.idempotency, self.deadlines = waiting, idempotency, deadlines
        self.jobs: dict[str, PendingJob] = {}  # by id, in the order of acceptance
        self.requests: dict[str, set[CallRequest]] = {}  # open ones by request id, which callers may choose
        self.released: dict[PendingJob, float] = {}  # RELEASED and CANCELLING jobs, and since when
        self.released_of: Counter[str] = Counter()  # the same by class
        self.bulk_released_of: Counter[str] = Counter()  # those of bulk jobs by class

    def join(self, job: PendingJob, ticket: Ticket) -> None:
        assert job.state in (JobState.WAITING, JobState.RELEASED)
        job.tickets.append(ticket)
        ticket.job = job
        self.set_deadline(ticket, ticket.deadline_at)

    def set_deadline(self, ticket: Ticket, at: float) -> None:
        ticket.due.discard(ticket)
        ticket.due = self.deadlines.set(ticket, at)

    def release(self, jobs: Sequence[PendingJob], now: float) -> None:
        """The fair queue has handed these out."""
        for job in jobs:
            assert job.state is JobState.WAITING
            job.state = JobState.RELEASED
            self.released[job] = now
            self.released_of[job.needs] += 1
            if job.priority == "bulk":
                self.bulk_released_of[job.needs] += 1

    def take_back(self, jobs: Sequence[PendingJob]) -> None:
        """They wait again, first in their lines: the queue did not take them, or lost them."""
        for job in jobs:
            assert job.state is JobState.RELEASED
            job.state = JobState.WAITING
            del self.released[job]
            self.released_of[job.needs] -= 1
            if job.priority == "bulk":
                self.bulk_released_of[job.needs] -= 1
        self.waiting.put_back(list(jobs))

    def start_cancel(self, job: PendingJob) -> None:
        """The job keeps its credit until the worker answers. Callers who send its key again get a new job."""
        assert job.state is JobState.RELEASED
        job.state = JobState.CANCELLING
        self.idempotency.stop(job)

    def finish(self, job: PendingJob) -> list[Ticket]:
        """Remove the job from every index. Returns its tickets, which have no job from now on."""
        assert job.state is not JobState.DONE
        if job.state is JobState.WAITING:
            self.waiting.remove(job)
        else:
            del self.released[job]
            self.released_of[job.needs] -= 1
            if job.priority == "bulk":
                self.bulk_released_of[job.needs] -= 1
        job.state = JobState.DONE
        del self.jobs[job.id]
        if job.key is not None:
            self.idempotency.stop(job)
        tickets, job.tickets = job.tickets, []
        for ticket in tickets:
            ticket.job = None
        return tickets

    def leave(self, ticket: Ticket) -> PendingJob | None:
        """The ticket needs no result from its job. Returns the job if nobody else does and the queue may have it."""
        ticket.due.discard(ticket)
        job, ticket.job = ticket.job, None
        if job is None:
            return None
        job.tickets.remove(ticket)
        if job.tickets:
            return None
        with_queue = job.state is not JobState.WAITING or job.publications > 0
        self.finish(job)
        return job if with_queue else None

    def oldest_waiting(self) -> PendingJob | None:
        """Jobs are indexed in the order of acceptance, and few of them are released."""
        return next((job for job in self.jobs.values() if job.state is JobState.WAITING and job.tickets), None)

    def released_before(self, at: float) -> dict[str, PendingJob]:
        """Jobs that were released earlier than that and are not being cancelled."""
        return {job.id: job for job, since in self.released.items() if since < at and not job.cancelling}
