"""Jobs that a worker holds without a slot for them: the rules Hold and Starts of `exec_wire.queue.protocol`, in every queue."""

import asyncio

import pytest
from queue_harness import Bench, nothing_comes, soon

from exec_wire import MAX_STARTS
from exec_wire.queue.protocol import LEASE_S, Answer


async def test_a_worker_takes_jobs_to_hold_beyond_those_that_start(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    jobs = [bench.job() for _ in range(4)]
    await gateway.publish(jobs)
    taken = await worker.take(1, hold=2)
    more = await worker.take(0, hold=2, wait=False)
    assert (len(taken), len(more)) == (3, 1)
    assert bench.in_order([*taken, *more]) == bench.in_order(jobs)
    assert await soon(worker.take(0, hold=2, wait=False)) == []


async def test_a_job_that_lost_workers_only_held_is_not_a_job_that_they_started(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    await gateway.publish([bench.job()])
    for number in range(2 * MAX_STARTS):
        worker = await bench.worker(f"w{number}")
        [job] = await worker.take(0, hold=1, wait=False)
        await bench.pass_s(LEASE_S + 0.1)
    [job] = await worker.take(1)
    assert job.deliveries <= 2


async def test_each_start_of_a_job_counts_once_whether_it_was_held_before_or_not(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    deliveries = []
    for worker, held in ((first, True), (second, True), (first, False), (second, True)):
        [job] = await (worker.take(0, hold=1, wait=False) if held else worker.take(1))
        deliveries.append(job.deliveries)
        if held:
            for _ in range(2):
                await worker.started([job.id])
        await bench.pass_s(LEASE_S + 0.1)
    assert deliveries == [1, 2, 3, 4]


async def test_what_is_taken_for_free_slots_counts_and_what_is_held_beside_it_does_not(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job() for _ in range(2)])
    [running, held] = await first.take(2)
    await bench.pass_s(LEASE_S + 0.1)
    assert [job.deliveries for job in await second.take(1, hold=1)] == [2, 2]
    await bench.pass_s(LEASE_S + 0.1)
    again = await first.take(2)
    while len(again) < 2:  # of another server
        again += await first.take(2 - len(again))
    assert sorted(job.deliveries for job in again) == [2, 3]
    assert bench.shards > 1 or {job.id: job.deliveries for job in again} == {running.id: 3, held.id: 2}


async def test_a_job_that_is_handed_back_keeps_its_place_and_was_not_started(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    jobs = [bench.job() for _ in range(2)]
    await gateway.publish(jobs)
    [held] = await first.take(0, hold=1, wait=False)
    assert await first.hand_back([held.id]) == [held.id]
    assert await first.hand_back([held.id]) == []
    assert await gateway.missing([held.id]) == []
    await bench.pass_s(LEASE_S + 0.1)  # no waiting worker was told
    again = await second.take(2)
    assert bench.in_order(again) == bench.in_order(jobs)
    assert [job.deliveries for job in again] == [1, 1]


async def test_a_worker_that_waits_gets_a_job_at_once_that_another_hands_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_wire.queue.redis_worker.BLOCK_S", 300.0)  # it does not look for it by itself
    monkeypatch.setattr("exec_wire.queue.memory.LEASE_S", 300.0)
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job() for _ in range(2)])
    [held, kept] = await first.take(0, hold=2, wait=False)
    hearing, waiting = asyncio.ensure_future(second.cancelled()), asyncio.ensure_future(second.take(1))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert await first.hand_back([held.id]) == [held.id]
    assert [(job.id, job.deliveries) for job in await soon(waiting)] == [(held.id, 1)]  # type: ignore[attr-defined]
    waiting = asyncio.ensure_future(second.take(1))
    await asyncio.sleep(0.2)
    await first.leave()
    assert [job.id for job in await soon(waiting)] == [kept.id]  # type: ignore[attr-defined]
    hearing.cancel()


async def test_a_job_that_was_handed_back_is_cancelled_at_once(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job()])
    [job] = await worker.take(0, hold=1, wait=False)
    await worker.hand_back([job.id])
    assert await gateway.cancel([job.id]) == [job.id]  # with no worker: never answered
    await bench.pass_s(LEASE_S + 0.1)
    assert await nothing_comes(worker.take(1))


async def test_a_job_that_was_cancelled_or_lost_is_not_handed_back(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job() for _ in range(2)])
    [cancelled, lost] = await first.take(0, hold=2, wait=False)
    assert await gateway.cancel([cancelled.id]) == []  # its worker answers
    await bench.pass_s(LEASE_S + 0.1)
    assert [job.id for job in await second.take(2)] == [lost.id]
    assert await first.hand_back([cancelled.id, lost.id]) == []
    await first.answer([Answer(cancelled.id, b"cancelled")])
    assert [answer.id for answer in await soon(gateway.receive())] == [cancelled.id]  # type: ignore[attr-defined]
