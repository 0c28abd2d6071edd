"""The worker's loop between a queue and a pool: every job is answered once, whatever happens below."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from common import until
from sandbox_harness import Lab, call_of

from exec_wire import MAX_STARTS, Call, Result, Sandbox, pack, unpack_result, verdict
from exec_wire.queue.memory import MemoryQueue, MemoryWorkerEnd
from exec_wire.queue.protocol import LEASE_S, Answer, Job, QueueUnavailable
from worker.consumer import Consumer
from worker.pool import Pool, SlotBusy
from worker.sandbox.zygote_client import ZygoteLost
from worker.slots import Claim, Slots

SLEEP = "import time\ntime.sleep(60)"


class ScriptedPool(Slots):
    """A pool whose programs do what the test says, in turn."""

    sandbox = Sandbox("A", ["all"])
    profiles = ["bare"]
    languages = ["python"]
    missing: dict[str, str] = {}
    alive = True

    def __init__(self, *ends: Any, slots: int = 1, holds: int = 0) -> None:
        super().__init__(slots)
        self.holds = holds
        self._ends = list(ends)
        self.starts = 0

    @property
    def to_hold(self) -> int:
        return self.holds

    async def run(self, call: Call, slot: int, remaining_s: float) -> Result:
        self.starts += 1
        end = self._ends.pop(0) if self._ends else verdict("ok")
        if isinstance(end, asyncio.Event):
            await end.wait()
            return verdict("ok")
        if isinstance(end, Result):
            return end
        raise end


class SessionRouter:
    """The gateway's side of a queue with one worker."""

    def __init__(self, queue: MemoryQueue, consumer: Consumer) -> None:
        self._queue, self._gateway = queue, queue.gateway("g")
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

    def tell_cancelled(self, *ids: str) -> None:
        """As the queue does, whether or not the worker has these jobs."""
        self._queue.cancels["w"].put(ids)

    async def slots(self) -> list[int]:
        return [info.slots for info in await self._gateway.workers()]


@asynccontextmanager
async def desk(pool: Any) -> AsyncIterator[SessionRouter]:
    queue = MemoryQueue()
    async with Consumer("w", pool, queue.worker("w")) as consumer:
        yield SessionRouter(queue, consumer)


class Holding(NamedTuple):
    queue: MemoryQueue
    there: SessionRouter
    pool: ScriptedPool
    go: asyncio.Event
    running: str  # the first one
    held: list[str]


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


# -- jobs that are held ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def holding(
    *, most: int = 1, hold_s: float = 60.0, end: Callable[[MemoryWorkerEnd], Any] = lambda end: end
) -> AsyncIterator[Holding]:
    """A worker whose programs run until `go` is set, one in each of `most` slots, and as many jobs that it holds."""
    queue, go = MemoryQueue(), asyncio.Event()
    pool = ScriptedPool(*[go] * most, slots=most, holds=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.consumer.HOLD_AT_MOST_S", hold_s)
        async with Consumer("w", pool, end(queue.worker("w"))) as consumer:  # type: ignore[arg-type]
            there = SessionRouter(queue, consumer)
            ids = [await there.send(remaining_s=60) for _ in range(2 * most)]
            held = ids[most:]
            await until(lambda: pool.starts == most and consumer._held == set(held), "some run, the others are held")
            yield Holding(queue, there, pool, go, ids[0], held)


async def test_held_jobs_start_when_slots_become_free() -> None:
    async with holding(most=3) as here:
        assert here.pool.starts == 3
        here.go.set()
        assert set(await here.there.answers(6)) > set(here.held)
    assert (here.pool.starts, here.pool.free_slots) == (6, 3)


async def test_a_worker_holds_no_more_than_it_should_and_takes_more_when_half_of_them_are_gone() -> None:
    async with holding(most=4) as here:
        more = [await here.there.send() for _ in range(3)]
        await asyncio.sleep(0.05)
        assert here.there.consumer._held == set(here.held)
        await here.there.cancel(here.held[0])
        await until(lambda: here.there.consumer._held == set(here.held[1:]), "it holds one less")
        await asyncio.sleep(0.05)
        assert here.there.consumer._held == set(here.held[1:])
        await here.there.cancel(here.held[1])
        await until(lambda: here.there.consumer._held == {*here.held[2:], *more[:2]}, "two more are held")


async def test_a_held_job_is_answered_cancelled_at_once_and_never_starts() -> None:
    async with holding() as here:
        await here.there.cancel(here.held[0])
        assert (await here.there.answers())[here.held[0]].status == "cancelled"
        assert not here.go.is_set()
        here.go.set()
        assert (await here.there.answers())[here.running].status == "ok"
    assert (here.pool.starts, here.pool.free_slots) == (1, 1)


async def test_a_held_job_expires_by_the_time_of_its_receipt() -> None:
    async with holding(most=2) as here:
        late = await here.there.send(remaining_s=0.2)
        await here.there.cancel(here.held[0])
        answers = await here.there.answers(2)
        assert (answers[here.held[0]].status, answers[late].status) == ("cancelled", "expired")
        assert (here.pool.starts, here.go.is_set()) == (2, False)


async def test_held_jobs_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.RENEW_S", 0.02)
    async with holding() as here:
        ends_at = here.queue.leases[here.held[0]].ends_at
        await until(lambda: here.queue.leases[here.held[0]].ends_at > ends_at, "its lease is renewed")


async def test_time_held_is_not_part_of_the_stay() -> None:
    async with holding() as here:
        await asyncio.sleep(0.2)
        released = time.monotonic()
        here.go.set()
        stays: dict[str, float] = {}
        while len(stays) < 2:
            stays |= {answer.id: answer.stay_ms for answer in await here.there._gateway.receive()}
        assert stays[here.held[0]] <= (time.monotonic() - released) * 1000
        assert stays[here.running] >= 200


async def test_a_held_job_counts_as_started_only_when_it_starts() -> None:
    async with holding() as here:
        again = asyncio.Event()
        here.pool._ends.append(again)
        assert not here.queue.leases[here.held[0]].counted
        here.go.set()
        await until(lambda: here.pool.starts == 2, "it starts")
        assert here.queue.leases[here.held[0]].counted
        again.set()
        await here.there.answers(2)


async def test_a_draining_worker_hands_back_what_it_holds_at_once_and_finishes_what_runs() -> None:
    async with holding(most=2) as here, Consumer("next", ScriptedPool(slots=2), here.queue.worker("next")):
        drained = asyncio.create_task(here.there.consumer.drain(60))
        answers = await here.there.answers(2)
        assert {id: result.worker for id, result in answers.items()} == dict.fromkeys(here.held, "next")
        here.go.set()
        assert {result.worker for result in (await here.there.answers(2)).values()} == {"w"}
        await drained
    assert here.pool.starts == 2


async def test_a_job_held_for_too_long_is_handed_back_to_an_idle_worker() -> None:
    async with holding(hold_s=0.5) as here, Consumer("next", ScriptedPool(), here.queue.worker("next")):
        here.pool.holds = 0  # its programs have become long
        assert (await here.there.answers())[here.held[0]].worker == "next"
        assert here.there.consumer._held == set()
        here.go.set()
        await here.there.answers()


async def test_a_held_job_that_no_other_worker_takes_runs_here_when_a_slot_is_free() -> None:
    async with holding(hold_s=0.5) as here:
        held = here.there.consumer._running[here.held[0]]
        await until(held.done, "it was handed back")
        here.go.set()
        answers = await here.there.answers(2)
        assert {result.status for result in answers.values()} == {"ok"} and here.pool.starts == 2


@pytest.mark.parametrize("first", ["cell", "job"])
async def test_a_free_slot_goes_to_the_older_one_of_a_cell_and_a_held_job(first: str) -> None:
    async with holding() as here:
        held = here.there.consumer._running[here.held[0]]
        since = time.monotonic() - (600 if first == "cell" else 0)
        cell = asyncio.create_task(here.pool.next_slot(Claim(since=since, is_cell=True)))
        await until(lambda: here.pool.cells_waiting == 1, "the cell waits")
        second = asyncio.Event()
        here.pool._ends.append(second)
        here.go.set()
        if first == "job":
            await until(lambda: here.pool.starts == 2, "the job starts")
            assert not cell.done()
            second.set()
            here.pool.give_back(await cell)
        else:
            slot = await cell
            assert here.pool.starts == 1
            here.pool.give_back(slot)
            second.set()
        await held
        await here.there.answers(2)


async def test_a_held_job_is_not_handed_back_while_a_cell_waits_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.HOLD_AT_MOST_S", 0.02)
    async with desk(pool := ScriptedPool()) as there:
        slot = pool.take_slot()
        cell = asyncio.create_task(pool.next_slot(Claim(tenant="other", is_cell=True)))
        id = await there.send()
        await until(lambda: there.consumer._held == {id}, "it waits beside the cell")
        task = there.consumer._running[id]
        await asyncio.sleep(0.2)
        assert there.consumer._running[id] is task
        pool.give_back(slot)
        pool.give_back(await cell)
        assert (await there.answers())[id].status == "ok"


async def test_held_jobs_start_and_are_counted_when_the_queue_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.consumer.QUEUE_PAUSE_S", 0.02)
    ends: list[FailingEnd] = []

    def failing(end: MemoryWorkerEnd) -> FailingEnd:
        ends.append(FailingEnd(end))
        return ends[0]

    async with holding(hold_s=0.5, end=failing) as here:
        ends[0].away = True
        await asyncio.sleep(0.6)
        assert here.there.consumer._held == set(here.held)  # it could not be handed back
        here.go.set()
        await until(lambda: not here.there.consumer._held, "it has a slot")
        await asyncio.sleep(0.1)
        assert here.pool.starts == 1 and not here.queue.leases[here.held[0]].counted
        ends[0].away = False
        assert {result.status for result in (await here.there.answers(2)).values()} == {"ok"}


class FailingEnd:
    """A worker's end of a queue whose `take` raises what the test says, and else does as the real one."""

    def __init__(self, end: MemoryWorkerEnd) -> None:
        self._end = end
        self.raises: list[BaseException] = []
        self.away = False

    async def hand_back(self, ids: Sequence[str]) -> list[str]:
        self._check()
        return await self._end.hand_back(ids)

    async def started(self, ids: Sequence[str]) -> None:
        self._check()
        await self._end.started(ids)

    async def answer(self, answers: Sequence[Answer]) -> None:
        self._check()
        await self._end.answer(answers)

    def _check(self) -> None:
        if self.away:
            raise QueueUnavailable("the server is away", sent=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    async def take(self, most: int, **how: Any) -> list[Job]:
        if self.raises:
            raise self.raises.pop(0)
        return await self._end.take(most, **how)


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
