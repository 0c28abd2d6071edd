"""A deadline covers the whole stay, and whoever is late says so."""

import asyncio

import pytest
from gateway_harness import lines, running, soon, until

from exec_service.dispatch.deadlines import Deadlines


async def test_a_call_that_waits_past_its_deadline_is_expired_and_never_started() -> None:
    async with running(slots=1) as service:
        blocking = soon(service.batch({"code": "hold"}, {"code": "hold"}))  # the window of one slot is 2
        await until(lambda: len(service.gateway.dispatch.released) == 2)
        result = (await service.run("say never", id="late", deadline_s=0.1)).json()
        assert (result["status"], result["blame"], result["retryable"], result["id"]) == ("expired", "infra", True, "late")
        assert result["timings"]["queue_ms"] >= 100
        service.worker.let_go.set()
        await blocking
        assert service.worker.codes == ["hold", "hold"]
        assert await service.metric("exec_calls_total", status="expired", blame="infra") == 1


async def test_a_call_without_any_worker_expires() -> None:
    async with running(worker=False) as service:
        assert (await service.run(deadline_s=0.05)).json()["status"] == "expired"


async def test_a_released_call_that_nobody_answers_is_worker_lost_after_the_grace_and_cancelled() -> None:
    async with running(answer_grace_s=0.1) as service:
        result = (await service.run("silent", deadline_s=1)).json()
        assert (result["status"], result["blame"], result["retryable"]) == ("worker_lost", "infra", True)
        assert result["timings"]["total_ms"] >= 1100
        await until(lambda: service.worker.cancelled == [service.worker.jobs[0].id])
        assert not service.gateway.dispatch.released


async def test_an_answer_within_the_grace_counts() -> None:
    async with running(answer_grace_s=60.0) as service:
        answering = soon(service.run("hold", deadline_s=3))
        await until(lambda: len(service.worker.jobs) == 1)
        await asyncio.sleep(3.1)
        service.worker.let_go.set()
        assert (await answering).json()["status"] == "ok"


async def test_a_job_carries_what_remains_of_its_deadline() -> None:
    async with running(slots=1) as service:
        blocking = soon(service.batch({"code": "hold"}, {"code": "hold"}))
        await until(lambda: len(service.gateway.dispatch.released) == 2)
        waiting = soon(service.run("say x", deadline_s=10))
        await until(lambda: len(service.gateway.dispatch.waiting) == 1)
        await asyncio.sleep(1)
        service.worker.let_go.set()
        await asyncio.gather(blocking, waiting)
        assert service.worker.jobs[2].remaining_ms <= 9_500


async def test_each_call_of_a_batch_has_its_own_deadline() -> None:
    async with running(worker=False) as service:
        calls = [{"code": "", "deadline_s": deadline_s} for deadline_s in (0.3, 0.1, 0.2)]
        assert [result.index for result in lines(await service.batch(*calls))] == [1, 2, 0]


@pytest.fixture
def rung() -> list[str]:
    return []


async def test_the_timer_reports_each_item_once_and_not_what_was_removed(rung: list[str]) -> None:
    loop = asyncio.get_running_loop()
    deadlines: Deadlines[str] = Deadlines(rung.append, loop.time)
    now = loop.time()
    delays_s = {"c": 0.15, "a": 0.03, "gone": 0.05, "b": 0.09}
    buckets = {item: deadlines.set(item, now + delay_s) for item, delay_s in delays_s.items()}
    buckets["gone"].remove("gone")
    buckets["b"].remove("b")
    deadlines.set("b", now + 0.12)  # moved
    await asyncio.sleep(0.3)
    assert rung == ["a", "b", "c"]
    assert len(deadlines) == 0


async def test_nothing_is_reported_early(rung: list[str]) -> None:
    now = 1000.0
    deadlines: Deadlines[str] = Deadlines(rung.append, lambda: now)
    deadlines.set("x", 1000.5)
    now = 1000.499
    deadlines.run_due()
    assert rung == []
    now = 1000.52
    deadlines.run_due()
    assert rung == ["x"]
    deadlines.close()


async def test_a_report_may_remove_and_set_others(rung: list[str]) -> None:
    now = 1000.0

    def overdue(item: str) -> None:
        rung.append(item)
        bucket.difference_update({"a", "b"} - {item})
        deadlines.set(item + "'", 1000.2) if not item.endswith("'") else None

    deadlines: Deadlines[str] = Deadlines(overdue, lambda: now)
    bucket = deadlines.set("a", 1000.1)
    assert deadlines.set("b", 1000.1) is bucket
    now = 1000.15
    deadlines.run_due()
    assert len(rung) == 1
    now = 1000.25
    deadlines.run_due()
    assert len(rung) == 2 and len(deadlines) == 0
    deadlines.close()


async def test_answered_calls_leave_nothing_behind_in_the_timer(rung: list[str]) -> None:
    deadlines: Deadlines[int] = Deadlines(lambda item: rung.append(str(item)), lambda: 1000.0)
    for item in range(10_000):
        deadlines.set(item, 1060.0 + item / 1000).remove(item)
    assert len(deadlines) == 0 and not any(deadlines._buckets.values()) and len(deadlines._buckets) <= 1
    deadlines.close()
