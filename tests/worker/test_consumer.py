"""The worker's loop between a queue and a pool: every job is answered once, whatever happens below."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sandbox_harness import Lab, call_of, until

from exec_wire import MAX_STARTS, Call, Result, Sandbox, pack, unpack_result, verdict
from exec_wire.memory_queue import MemoryQueue
from exec_wire.queue import Job
from worker.consumer import Consumer
from worker.pool import Pool, SlotBusy, ZygoteLost

SLEEP = "import time\ntime.sleep(60)"


class ScriptedPool:
    """A pool whose programs do what the test says, in turn."""

    sandbox = Sandbox("A", ["all"])
    profiles = ["bare"]
    languages = ["python"]
    missing: dict[str, str] = {}
    alive = True

    def __init__(self, *ends: Any, slots: int = 1) -> None:
        self.slots = slots
        self._free = list(range(slots))
        self._ends = list(ends)
        self.starts = 0

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
        self.starts += 1
        end = self._ends.pop(0) if self._ends else verdict("ok")
        if isinstance(end, asyncio.Event):
            await end.wait()
            return verdict("ok")
        if isinstance(end, Result):
            return end
        raise end


class Desk:
    """The gateway's side of a queue with one worker."""

    def __init__(self, queue: MemoryQueue, consumer: Consumer) -> None:
        self._gateway = queue.gateway("g")
        self.consumer = consumer
        self._numbers = 0

    async def send(self, code: str = "pass", *, remaining_s: float = 30.0, deliveries: int = 1, **fields: Any) -> str:
        self._numbers += 1
        id = f"job{self._numbers}"
        job = Job(id, pack(call_of(code, **fields)), round(remaining_s * 1000), "g", deliveries=deliveries)
        await self._gateway.publish([job])
        return id

    async def answers(self, count: int = 1) -> dict[str, Result]:
        found: dict[str, Result] = {}
        async with asyncio.timeout(30):
            while len(found) < count:
                for answer in await self._gateway.receive():
                    assert answer.id not in found
                    found[answer.id] = unpack_result(answer.payload)
        return found

    async def ask(self, code: str = "pass", **fields: Any) -> Result:
        id = await self.send(code, **fields)
        return (await self.answers())[id]

    async def cancel(self, id: str) -> None:
        await self._gateway.cancel([id])

    async def workers(self) -> list[str]:
        return [info.id for info in await self._gateway.workers()]


@asynccontextmanager
async def desk(pool: Any) -> AsyncIterator[Desk]:
    queue = MemoryQueue()
    async with Consumer("w", pool, queue.worker("w")) as consumer:
        yield Desk(queue, consumer)


@pytest.fixture
async def real(own_lab: Lab) -> AsyncIterator[tuple[Desk, Lab]]:
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


async def test_cancelled_job_is_killed_and_answered_cancelled(real: tuple[Desk, Lab]) -> None:
    there, lab = real
    id = await there.send(SLEEP, wall_s=60)
    await until(lambda: lab.sandboxed_pids, "the program runs")
    await there.cancel(id)
    result = (await there.answers())[id]
    assert (result.status, result.blame) == ("cancelled", "client")
    assert lab.sandboxed_pids == []
    assert (await there.ask("print(1)")).stdout == "1\n"


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
        there = Desk(queue, consumer)
        id = await there.send()
        await until(lambda: pool.starts == 1, "it runs")
    assert pool.starts == 1
    async with Consumer("next", ScriptedPool(), queue.worker("next")):
        assert (await there.answers())[id].worker == "next"


async def test_program_whose_zygote_is_killed_is_answered_all_the_same(real: tuple[Desk, Lab]) -> None:
    there, lab = real
    ids = [await there.send("import time\ntime.sleep(1)\nprint('done')") for _ in range(2)]
    await until(lambda: len(lab.sandboxed_pids) >= 4, "both run")
    os.kill(lab.zygote_pids[0], signal.SIGKILL)
    answers = await there.answers(2)
    assert [answers[id].stdout for id in ids] == ["done\n", "done\n"]


async def test_program_whose_runner_is_killed_is_answered_all_the_same(real: tuple[Desk, Lab]) -> None:
    there, lab = real
    ids = [await there.send("import time\ntime.sleep(1)\nprint('done')") for _ in range(4)]
    await until(lambda: len(lab.sandboxed_pids) >= 4, "some run")
    os.kill(lab.runner_pid, signal.SIGKILL)
    answers = await there.answers(4)
    assert [answers[id].stdout for id in ids] == ["done\n"] * 4


async def test_program_that_never_finds_a_runner_again_is_answered_expired(
    real: tuple[Desk, Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, lab = real

    async def fail(pool: Pool) -> None:
        raise OSError("no runner can be had")

    monkeypatch.setattr(Pool, "_start_runner", fail)
    os.kill(lab.runner_pid, signal.SIGKILL)
    await until(lambda: not lab.pool.alive, "the runner's end is seen")
    result = await there.ask("print(1)", remaining_s=0.5)
    assert (result.status, result.blame, result.retryable) == ("expired", "infra", True)


async def test_worker_without_a_runner_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.RENEW_S", 0.02)
    monkeypatch.setattr("exec_wire.memory_queue.LEASE_S", 0.1)
    pool = ScriptedPool()
    async with desk(pool) as there:
        for alive, announced in ((True, ["w"]), (False, []), (True, ["w"])):
            pool.alive = alive
            async with asyncio.timeout(30):
                while await there.workers() != announced:  # noqa: ASYNC110 - the worker's own clock decides
                    await asyncio.sleep(0.01)
