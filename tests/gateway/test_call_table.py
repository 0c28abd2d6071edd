"""Each transition of a job, alone and in its races: cancel while publishing, late answers, the same key twice, a lost queue."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from gateway_harness import Service, running, soon, until

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.call_table import CallTable
from exec_service.dispatch.deadlines import Deadlines
from exec_service.dispatch.fair_queue import Credit, FairQueue
from exec_service.dispatch.idempotency import Idempotency
from exec_service.dispatch.requests import ANONYMOUS, CallRequest
from exec_service.dispatch.tickets import JobState, Key, PendingJob, Ticket
from exec_service.telemetry.metrics import Metrics
from exec_wire.messages.calls import Tags
from exec_wire.queue.protocol import Job, QueueUnavailable


def nothing(*_: object) -> None:
    pass


async def table_with(state: JobState) -> tuple[CallTable, PendingJob, Ticket]:
    table = CallTable(FairQueue(), Idempotency(60, 1 << 20, time.monotonic), Deadlines(nothing, time.monotonic))
    job = PendingJob("1", b"program", "python", Key("t", "k"))
    request = CallRequest(ANONYMOUS, Admission(9, 99, 1.0, time.monotonic), Metrics())
    ticket = Ticket(request, 0, "", 0.0, time.monotonic() + 60, 7, Tags(), "t")
    table.jobs[job.id] = job
    table.idempotency.start(job)
    table.waiting.put(job)
    table.join(job, ticket)
    if state is not JobState.WAITING:
        assert table.waiting.take(Credit(1, {"python": 1})) is job
        table.release([job], 0.0)
    if state is JobState.CANCELLING:
        table.start_cancel(job)
    if state is JobState.DONE:
        table.finish(job)
    assert job.state is state
    return table, job, ticket


TRANSITIONS: dict[str, tuple[Callable[[CallTable, PendingJob], object], set[JobState]]] = {
    "release": (lambda table, job: table.release([job], 0.0), {JobState.WAITING}),
    "take_back": (lambda table, job: table.take_back([job]), {JobState.RELEASED}),
    "start_cancel": (lambda table, job: table.start_cancel(job), {JobState.RELEASED}),
    "finish": (lambda table, job: table.finish(job), {JobState.WAITING, JobState.RELEASED, JobState.CANCELLING}),
}


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("name", TRANSITIONS)
async def test_a_transition_checks_where_it_starts(name: str, state: JobState) -> None:
    change, allowed = TRANSITIONS[name]
    table, job, _ = await table_with(state)
    if state in allowed:
        change(table, job)
    else:
        with pytest.raises(AssertionError):
            change(table, job)


@pytest.mark.parametrize("state", [JobState.WAITING, JobState.RELEASED, JobState.CANCELLING])
async def test_a_job_that_the_last_ticket_leaves_is_in_no_index(state: JobState) -> None:
    table, job, ticket = await table_with(state)
    assert table.leave(ticket) is (None if state is JobState.WAITING else job)  # else the queue has nothing to cancel
    assert job.state is JobState.DONE and ticket.job is None
    assert (len(table.jobs), len(table.waiting), len(table.released), len(table.deadlines)) == (0, 0, 0, 0)
    assert not table.idempotency.knows(Key("t", "k")) and not any(table.released_of.values())


def assert_empty(service: Service) -> None:
    table = service.gateway.dispatch.table
    assert (len(table.waiting), len(table.released), len(table.deadlines), len(table.jobs)) == (0, 0, 0, 0)
    assert service.gateway.dispatch.admission.calls == 0


class Publishing:
    """The queue's `publish`, which waits for `go` and may fail: before it has sent the jobs, or after."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> None:
        self.begun, self.go, self._fails = asyncio.Event(), asyncio.Event(), fails
        queue = service.gateway.dispatch._queue
        self._real = queue.publish
        monkeypatch.setattr(queue, "publish", self)
        monkeypatch.setattr("exec_service.dispatch.release.RETRY_S", 0.01)

    async def __call__(self, jobs: Sequence[Job]) -> None:
        self.begun.set()
        await self.go.wait()
        fails, self._fails = self._fails, ""
        if fails == "before":
            raise QueueUnavailable("lost", sent=False)
        await self._real(jobs)
        if fails == "after":
            raise QueueUnavailable("lost", sent=True)


@pytest.mark.parametrize("fails", ["", "before", "after"])
async def test_cancel_while_publishing(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    async with running() as service:
        publishing = Publishing(service, monkeypatch, fails=fails)
        result = soon(service.run("hold", tags={"run": "r"}))
        await publishing.begun.wait()
        assert (await service.client.delete("/v1/calls?run=r")).json() == {"cancelled": 1}
        publishing.go.set()
        assert (await result).json()["status"] == "cancelled"
        await until(lambda: not service.worker._running)
        assert_empty(service)


async def test_an_answer_after_the_deadline_is_dropped_and_counted() -> None:
    async with running(answer_grace_s=0.05) as service:
        service.worker.deaf = True
        assert (await service.run("hold", deadline_s=0.1)).json()["status"] == "worker_lost"
        service.worker.let_go.set()
        await until(lambda: not service.worker._running)
        registry = service.gateway.metrics.registry
        await until(lambda: registry.get_sample_value("exec_late_answers_total") == 1)
        assert_empty(service)


async def test_the_same_key_twice_is_one_job_and_later_its_record() -> None:
    async with running() as service:
        both = [soon(service.run("hold", idempotency_key="k", id=name)) for name in ("a", "b")]
        await until(lambda: sum(len(job.tickets) for job in service.gateway.dispatch.table.jobs.values()) == 2)
        service.worker.let_go.set()
        assert [((await one).json()["id"], (await one).json()["status"]) for one in both] == [("a", "ok"), ("b", "ok")]
        assert (await service.run("hold", idempotency_key="k")).json()["status"] == "ok"
        assert len(service.worker.jobs) == 1
        assert_empty(service)


async def test_the_key_of_a_job_that_is_being_cancelled_gets_a_new_job() -> None:
    async with running() as service:
        service.worker.kill_gate.clear()
        first = soon(service.run("hold", idempotency_key="k", tags={"run": "r"}))
        await until(lambda: len(service.worker.jobs) == 1)
        assert (await service.client.delete("/v1/calls?run=r")).json() == {"cancelled": 1}
        second = soon(service.run("hold", idempotency_key="k"))
        await until(lambda: len(service.worker.jobs) == 2)
        service.worker.let_go.set()
        assert (await second).json()["status"] == "ok"
        service.worker.kill_gate.set()
        assert (await first).json()["status"] == "cancelled"
        assert_empty(service)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_queue_that_is_lost_while_publishing_answers_once(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    async with running() as service:
        publishing = Publishing(service, monkeypatch, fails=fails)
        publishing.go.set()
        assert (await service.run("say once")).json()["stdout"] == "once"
        await until(lambda: not service.worker._running)
        assert_empty(service)
