"""Jobs that a worker holds without a slot for them: they start soon, and else they go where there is one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from common import until
from consumer_harness import FailingEnd, ScriptedPool, SessionRouter, desk

from exec_wire.queue.memory import MemoryQueue, MemoryWorkerEnd
from worker.consumer import Consumer
from worker.slots import Claim


class Holding(NamedTuple):
    queue: MemoryQueue
    there: SessionRouter
    pool: ScriptedPool
    go: asyncio.Event
    running: str  # the first one
    held: list[str]


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


async def test_a_worker_with_a_free_slot_and_too_many_unsent_answers_takes_nothing_until_one_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.consumer.QUEUE_PAUSE_S", 0.02)
    queue, pool = MemoryQueue(), ScriptedPool(holds=1)
    end = FailingEnd(queue.worker("w"))
    end.away = True
    async with Consumer("w", pool, end) as consumer:  # type: ignore[arg-type]
        there = SessionRouter(queue, consumer)
        for number in (1, 2):
            await there.send()
            await until(lambda: pool.starts == number and pool.free_slots == 1, "its answer waits")  # noqa: B023
        await asyncio.sleep(0.1)
        takes = end.takes
        waiting = await there.send()
        await asyncio.sleep(0.1)
        assert (end.takes, pool.starts) == (takes, 2)
        end.away = False
        assert waiting in await there.answers(3)


async def test_a_worker_beside_its_queue_holds_nothing_and_says_so() -> None:
    queue, go = MemoryQueue(), asyncio.Event()
    pool = ScriptedPool(go, holds=1)
    async with Consumer("w", pool, queue.worker("w"), near=True) as consumer:  # type: ignore[arg-type]
        there = SessionRouter(queue, consumer)
        first, second = [await there.send() for _ in range(2)]
        await until(lambda: pool.starts == 1, "the first runs")
        assert (consumer._held, [job.id for job, _ in queue.waiting]) == (set(), [second])
        assert [info.holds for info in await there._gateway.workers()] == [0]
        go.set()
        assert set(await there.answers(2)) == {first, second}
