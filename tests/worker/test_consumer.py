"""The worker's loop between a queue and a pool: every job is answered once, whatever happens below."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from common import until
from consumer_harness import FailingEnd, ScriptedPool, SessionRouter, desk
from sandbox_harness import Lab

from exec_wire import MAX_STARTS, Call, Result
from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import LEASE_S, Job
from worker.consumer import Consumer
from worker.pool import Pool, SlotBusy
from worker.sandbox.zygote_client import ZygoteLost

SLEEP = "import time\ntime.sleep(60)"


@pytest.fixture
async def real(own_lab: Lab) -> AsyncIterator[tuple[SessionRouter, Lab]]:
    async with desk(own_lab.pool) as there:
        yield there, own_lab


async def test_job_is_answered_with_the_workers_name(lab: Lab) -> None:
    async with desk(lab.pool) as there:
        result = await there.ask("print(2)")
    assert (result.status, result.stdout, result.worker, result.sandbox.tier) == ("ok", "2\n", "w", "A")


async def test_more_jobs_than_slots_are_all_answered(lab: Lab) -> None:
    async with desk(lab.pool) as there:
        ids = {await there.send(f"print({number})"): f"{number}\n" for number in range(20)}
        answers = await there.answers(20)
    assert {id: result.stdout for id, result in answers.items()} == ids


async def test_late_job_is_answered_expired_and_not_started() -> None:
    pool = ScriptedPool()
    async with desk(pool) as there:
        result = await there.ask(remaining_s=0.0)
    assert (result.status, result.blame, result.retryable, pool.starts) == ("expired", "infra", True, 0)


async def test_no_interpreter_before_the_deadline_is_expired() -> None:
    async with desk(ScriptedPool(TimeoutError())) as there:
        assert (await there.ask()).status == "expired"


async def test_program_of_a_lost_zygote_is_started_again() -> None:
    pool = ScriptedPool(ZygoteLost(), ZygoteLost())
    async with desk(pool) as there:
        assert (await there.ask()).status == "ok"
    assert pool.starts == 3


async def test_program_that_lost_three_zygotes_is_worker_lost_and_not_offered_again() -> None:
    pool = ScriptedPool(*[ZygoteLost() for _ in range(9)])
    async with desk(pool) as there:
        result = await there.ask()
    assert (result.status, result.blame, result.retryable, pool.starts) == ("worker_lost", "infra", False, MAX_STARTS)


async def test_starts_of_other_workers_count() -> None:
    pool = ScriptedPool(ZygoteLost())
    async with desk(pool) as there:
        assert (await there.ask(deliveries=3)).status == "worker_lost"
        assert pool.starts == 1
        assert (await there.ask(deliveries=4)).status == "worker_lost"
    assert pool.starts == 1


async def test_busy_slot_is_tried_again_and_is_no_start() -> None:
    pool = ScriptedPool(*[SlotBusy() for _ in range(MAX_STARTS + 2)])
    async with desk(pool) as there:
        assert (await there.ask()).status == "ok"


async def test_exception_in_the_worker_is_internal_error_and_the_slot_goes_on() -> None:
    pool = ScriptedPool(RuntimeError("a secret"), ValueError())
    async with desk(pool) as there:
        result = await there.ask()
        assert (result.status, result.blame, result.retryable) == ("internal_error", "infra", True)
        assert "RuntimeError" in result.error and "secret" not in result.error
        assert (await there.ask()).status == "internal_error"
        assert (await there.ask()).status == "ok"
    assert pool.free_slots == 1


async def test_job_that_cannot_be_read_is_answered() -> None:
    async with desk(ScriptedPool()) as there:
        await there._gateway.publish([Job("bad", b"\xc1", 10_000, "g")])
        assert (await there.answers())["bad"].status == "internal_error"


async def test_cancelled_job_is_killed_and_answered_cancelled(real: tuple[SessionRouter, Lab]) -> None:
    there, lab = real
    id = await there.send(SLEEP, wall_s=60)
    await until(lambda: lab.sandboxed_pids, "the program runs")
    await there.cancel(id)
    result = (await there.answers())[id]
    assert (result.status, result.blame) == ("cancelled", "client")
    assert lab.sandboxed_pids == []
    assert (await there.ask("print(1)")).stdout == "1\n"


async def test_cancel_that_comes_before_its_job_was_taken_acts_when_it_is_taken() -> None:
    pool = ScriptedPool()
    async with desk(pool) as there:
        there.tell_cancelled("job1", "of-another-worker")
        await asyncio.sleep(0)
        result = await there.ask()
        assert (result.status, result.blame, pool.starts) == ("cancelled", "client", 0)
        assert (await there.ask()).status == "ok"
    assert pool.free_slots == 1


async def test_cancel_that_comes_while_the_task_of_its_job_is_being_created_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ScriptedPool()
    async with desk(pool) as there:
        start = there.consumer._start

        def start_cancelled(job: Job) -> None:
            there.tell_cancelled(job.id)  # heard in this turn of the loop, before the new task's first step
            start(job)

        monkeypatch.setattr(there.consumer, "_start", start_cancelled)
        async with asyncio.timeout(10):
            result = await there.ask()
        assert (result.status, pool.starts, pool.free_slots) == ("cancelled", 0, 1)


async def test_program_that_is_cancelled_twice_is_answered_only_when_it_is_dead() -> None:
    begun, dead = asyncio.Event(), asyncio.Event()

    class SlowToDie(ScriptedPool):
        async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
            begun.set()
            try:
                return await asyncio.Future()
            except asyncio.CancelledError:
                await dead.wait()
                raise

    pool = SlowToDie()
    async with desk(pool) as there:
        id = await there.send()
        await begun.wait()
        for _ in range(2):
            there.tell_cancelled(id)
            await asyncio.sleep(0.05)
        assert pool.free_slots == 0
        dead.set()
        assert (await there.answers())[id].status == "cancelled"


async def test_draining_worker_answers_what_is_cancelled_meanwhile() -> None:
    pool = ScriptedPool(asyncio.Event())
    async with desk(pool) as there:
        id = await there.send()
        await until(lambda: pool.starts == 1, "it runs")
        draining = asyncio.create_task(there.consumer.drain(30))
        await until(lambda: there.consumer.draining, "it drains")
        await there.cancel(id)
        async with asyncio.timeout(30):
            assert (await there.answers())[id].status == "cancelled"
            await draining


async def test_program_whose_lease_lapsed_is_killed_when_its_call_is_cancelled() -> None:
    """The job waits again for a worker, and the worker that was too slow to renew it still runs it."""
    now = [1000.0]
    queue = MemoryQueue(lambda: now[0])
    async with Consumer("w", ScriptedPool(asyncio.Event()), queue.worker("w")) as consumer:  # type: ignore[arg-type]
        there = SessionRouter(queue, consumer)
        id = await there.send()
        await until(lambda: not consumer._pool.free_slots, "the program runs")
        now[0] += LEASE_S + 1
        queue.return_expired()
        await there.cancel(id)
        await until(lambda: bool(consumer._pool.free_slots), "the program was killed")


async def test_draining_worker_finishes_what_runs() -> None:
    end = asyncio.Event()
    pool = ScriptedPool(end)
    async with desk(pool) as there:
        id = await there.send()
        await until(lambda: pool.starts == 1, "it runs")
        drained = asyncio.create_task(there.consumer.drain(10))
        await asyncio.sleep(0.05)
        end.set()
        assert (await there.answers())[id].status == "ok"
        await drained


async def test_worker_that_leaves_hands_back_what_runs() -> None:
    queue = MemoryQueue()
    pool = ScriptedPool(asyncio.Event())
    async with Consumer("w", pool, queue.worker("w")) as consumer:
        there = SessionRouter(queue, consumer)
        id = await there.send()
        await until(lambda: pool.starts == 1, "it runs")
    assert pool.starts == 1
    async with Consumer("next", ScriptedPool(), queue.worker("next")):
        assert (await there.answers())[id].worker == "next"


async def test_program_whose_zygote_is_killed_is_answered_all_the_same(real: tuple[SessionRouter, Lab]) -> None:
    there, lab = real
    ids = [await there.send("import time\ntime.sleep(1)\nprint('done')") for _ in range(2)]
    await until(lambda: len(lab.sandboxed_pids) >= 4, "both run")
    os.kill(lab.zygote_pids[0], signal.SIGKILL)
    answers = await there.answers(2)
    assert [answers[id].stdout for id in ids] == ["done\n", "done\n"]


async def test_program_whose_runner_is_killed_is_answered_all_the_same(real: tuple[SessionRouter, Lab]) -> None:
    there, lab = real
    ids = [await there.send("import time\ntime.sleep(1)\nprint('done')") for _ in range(4)]
    await until(lambda: len(lab.sandboxed_pids) >= 4, "some run")
    os.kill(lab.runner_pid, signal.SIGKILL)
    answers = await there.answers(4)
    assert [answers[id].stdout for id in ids] == ["done\n"] * 4


async def test_program_that_never_finds_a_runner_again_is_answered_expired(
    real: tuple[SessionRouter, Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, lab = real

    async def fail(pool: Pool) -> None:
        raise OSError("no runner can be had")

    monkeypatch.setattr(Pool, "_start_runner", fail)
    os.kill(lab.runner_pid, signal.SIGKILL)
    await until(lambda: not lab.pool.alive, "the runner's end is seen")
    result = await there.ask("print(1)", remaining_s=0.5)
    assert (result.status, result.blame, result.retryable) == ("expired", "infra", True)


async def slots_become(there: SessionRouter, slots: int) -> None:
    async with asyncio.timeout(20):
        while await there.slots() != [slots]:  # noqa: ASYNC110 - the worker announces them in its own time
            await asyncio.sleep(0.01)


async def test_worker_without_a_runner_announces_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.RENEW_S", 0.02)
    pool = ScriptedPool(slots=3)
    async with desk(pool) as there:
        await slots_become(there, 3)
        pool.alive = False
        await slots_become(there, 0)
        pool.alive = True
        await slots_become(there, 3)


@asynccontextmanager
async def failing_desk(raises: list[BaseException]) -> AsyncIterator[SessionRouter]:
    queue = MemoryQueue()
    end = FailingEnd(queue.worker("w"))
    end.raises = raises
    async with Consumer("w", ScriptedPool(slots=3), end) as consumer:  # type: ignore[arg-type]
        yield SessionRouter(queue, consumer)


async def test_a_take_loop_that_fails_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async with failing_desk([ZeroDivisionError("in take"), asyncio.CancelledError()]) as there:
        assert (await there.ask()).status == "ok"
    assert "ZeroDivisionError: in take" in caplog.text and "Traceback" in caplog.text


async def test_a_worker_whose_take_loop_keeps_failing_announces_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.RENEW_S", 0.02)
    raises: list[BaseException] = [ZeroDivisionError() for _ in range(1000)]
    async with failing_desk(raises) as there:
        await slots_become(there, 0)
        del raises[:]
        await slots_become(there, 3)
        assert (await there.ask()).status == "ok"


async def test_a_job_that_cannot_be_read_is_answered_internal_error() -> None:
    async with desk(ScriptedPool()) as there:
        await there._gateway.publish([Job("j", b"\xc1", 30_000, "g")])
        assert (await there.answers())["j"].status == "internal_error"
