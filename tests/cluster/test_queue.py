"""The rules of the job queue (`exec_wire.queue.protocol`), as a suite that every implementation passes.

A queue is made by a factory and told the time by a clock that the tests move, so that leases expire without waiting.
"""

import asyncio

import msgspec
import pytest
from msgspec.structs import replace
from queue_harness import Bench, nothing_comes, soon

from exec_wire import Call, pack, unpack_result
from exec_wire.messages.sessions import Refused, unpack_reply
from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import LEASE_S, RENEW_S, Answer, Job, WorkerInfo
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.echo import EchoPool


async def test_a_published_job_is_taken_whole_and_its_answer_returns(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    job = bench.job()
    await gateway.publish([job])
    [taken] = await worker.take(1)
    assert (taken.id, taken.payload, taken.reply_to, taken.needs, taken.deliveries) == (job.id, job.payload, "g1", "python", 1)
    answer = Answer(job.id, b"result", 12.5)
    await worker.answer([answer])
    assert await soon(gateway.receive()) == [answer]


async def test_a_gateway_knows_the_name_that_its_answers_are_sent_to(bench: Bench) -> None:
    assert (await bench.gateway("g7")).name == "g7"


async def test_take_waits_for_a_job(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    taking = asyncio.ensure_future(worker.take(1))
    await asyncio.sleep(0.01)
    assert not taking.done()
    job = bench.job()
    await gateway.publish([job])
    assert [taken.id for taken in await asyncio.wait_for(taking, 30)] == [job.id]


async def test_a_worker_takes_no_more_than_it_asked_for_in_order(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    jobs = [bench.job() for _ in range(5)]
    await gateway.publish(jobs)
    first, rest = await worker.take(2), await worker.take(9)
    assert (len(first), len(rest)) == (2, 3)
    assert bench.in_order([*first, *rest]) == bench.in_order(jobs)


async def test_each_job_goes_to_one_worker(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    workers = [await bench.worker(f"w{number}") for number in range(3)]
    taking = [asyncio.ensure_future(worker.take(2)) for worker in workers]
    await asyncio.sleep(0.01)
    jobs = [bench.job() for _ in range(6)]
    await gateway.publish(jobs)
    taken = [job.id for batch in await asyncio.gather(*taking) for job in batch]
    while len(taken) < 6:
        taken += [job.id for job in await asyncio.wait_for(workers[0].take(2), 30)]
    assert sorted(taken) == sorted(job.id for job in jobs)


async def test_answers_go_to_the_gateway_that_asked(bench: Bench) -> None:
    one, two, worker = await bench.gateway("g1"), await bench.gateway("g2"), await bench.worker("w1")
    jobs = [bench.job("g1"), bench.job("g2")]
    await one.publish(jobs[:1])
    await two.publish(jobs[1:])
    taken = await worker.take(1) + await worker.take(1)
    await worker.answer([Answer(job.id, job.reply_to.encode()) for job in taken])
    assert [answer.payload for answer in await soon(one.receive())] == [b"g1"]  # type: ignore[attr-defined]
    assert [answer.payload for answer in await soon(two.receive())] == [b"g2"]  # type: ignore[attr-defined]


async def test_receive_gives_all_answers_that_are_there(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job() for _ in range(3)])
    for job in await worker.take(3):
        await worker.answer([Answer(job.id, b"")])
    count = len(await soon(gateway.receive()))  # type: ignore[arg-type]
    while bench.shards > 1 and count < 3:  # each server has its own
        count += len(await soon(gateway.receive()))  # type: ignore[arg-type]
    assert count == 3


async def test_what_remains_of_a_deadline_shrinks_while_a_job_waits(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job(remaining_ms=10_000)])
    await bench.pass_s(4)
    [job] = await worker.take(1)
    assert 0 < job.remaining_ms <= 6_050  # more may really pass at a server


async def test_how_long_a_job_has_waited_grows_while_it_waits_in_the_queue(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([msgspec.structs.replace(bench.job(), waited_ms=2_000, weight=3.0)])
    await bench.pass_s(4)
    [job] = await worker.take(1)
    assert job.waited_ms >= 5_950 and job.weight == 3.0


async def test_a_worker_that_does_not_wait_takes_what_is_there(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    assert await soon(worker.take(2, wait=False)) == []
    jobs = [bench.job() for _ in range(3)]
    await gateway.publish(jobs)
    taken = await worker.take(2, wait=False) + await worker.take(2, wait=False)
    assert bench.in_order(taken) == bench.in_order(jobs)
    assert await soon(worker.take(2, wait=False)) == []


async def test_a_late_job_is_delivered_and_not_dropped(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job(remaining_ms=1_000)])
    await bench.pass_s(3)
    [job] = await worker.take(1)
    assert job.remaining_ms <= 0


async def test_a_lease_that_nobody_renews_is_handed_to_another_worker_and_counted(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job(remaining_ms=60_000)])
    [job] = await first.take(1)
    await bench.pass_s(LEASE_S - 0.1)
    assert await nothing_comes(second.take(1))
    await bench.pass_s(0.2)
    [again] = await second.take(1)
    assert (again.id, again.payload, again.deliveries) == (job.id, job.payload, 2)
    assert 50_000 < again.remaining_ms <= 60_000 - LEASE_S * 1000  # some seconds really pass at a server
    await bench.pass_s(LEASE_S + 0.1)
    assert [taken.deliveries for taken in await first.take(1)] == [3]


async def test_an_expired_job_goes_before_those_that_came_later(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    jobs = [bench.job() for _ in range(2)]
    await gateway.publish(jobs)
    await first.take(1)
    await bench.pass_s(LEASE_S + 0.1)
    assert bench.in_order(await second.take(2)) == bench.in_order(jobs)


async def test_a_renewed_lease_holds(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await first.take(1)
    for _ in range(5):
        await bench.pass_s(RENEW_S)
        await first.renew([job.id])
    assert await nothing_comes(second.take(1))


async def test_a_worker_cannot_renew_what_it_has_lost(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await first.take(1)
    await bench.pass_s(LEASE_S + 0.1)
    await second.take(1)
    await bench.pass_s(LEASE_S - 0.1)
    await first.renew([job.id])
    await bench.pass_s(0.2)
    assert [taken.deliveries for taken in await first.take(1)] == [3]


async def test_an_answered_job_is_not_delivered_again(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await first.take(1)
    await first.answer([Answer(job.id, b"")])
    await bench.pass_s(LEASE_S + 1)
    assert await nothing_comes(second.take(1))


async def test_the_answer_of_a_worker_that_lost_its_lease_is_still_delivered(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await first.take(1)
    await bench.pass_s(LEASE_S + 1)
    await second.take(1)
    await first.answer([Answer(job.id, b"first")])
    await second.answer([Answer(job.id, b"second")])
    received = await soon(gateway.receive())
    while len(received) < 2:  # type: ignore[arg-type]
        received += await soon(gateway.receive())  # type: ignore[operator]
    assert [answer.payload for answer in received] == [b"first", b"second"]  # type: ignore[attr-defined]


async def test_an_answer_to_a_gateway_that_is_gone_harms_nobody(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job("gone"), bench.job("g1")])
    jobs = await worker.take(2)
    await worker.answer([Answer(job.id, b"") for job in jobs])
    [alive] = [job.id for job in jobs if job.reply_to == "g1"]
    assert [answer.id for answer in await soon(gateway.receive())] == [alive]  # type: ignore[attr-defined]


async def test_a_cancelled_job_that_nobody_took_is_forgotten(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    jobs = [bench.job() for _ in range(3)]
    await gateway.publish(jobs)
    assert await gateway.cancel([jobs[1].id, "never-existed"]) == [jobs[1].id]  # with no worker: never answered
    assert bench.in_order(await worker.take(3)) == [jobs[0].id, jobs[2].id]


async def test_the_worker_that_runs_a_cancelled_job_is_told(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job() for _ in range(2)])
    [mine], [other] = await first.take(1), await second.take(1)
    assert await gateway.cancel([mine.id]) == []  # the worker will answer
    assert await soon(first.cancelled()) == [mine.id]
    await first.answer([Answer(mine.id, b"cancelled")])
    assert [answer.id for answer in await soon(gateway.receive())] == [mine.id]  # type: ignore[attr-defined]
    assert other.id != mine.id


async def test_a_cancelled_job_is_not_started_again_when_its_worker_dies(bench: Bench) -> None:
    gateway, first, second = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await first.take(1)
    await gateway.cancel([job.id])
    await bench.pass_s(LEASE_S + 1)
    assert await nothing_comes(second.take(1))


async def test_a_worker_is_seen_while_it_announces_itself(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")

    async def seen() -> list[WorkerInfo]:
        return [replace(info, shards=[]) for info in await gateway.workers()]

    assert await seen() == []
    await worker.announce(WorkerInfo("w1", 4, tier="A"))
    assert await seen() == [WorkerInfo("w1", 4, tier="A")]
    await bench.pass_s(LEASE_S / 2)
    await worker.announce(WorkerInfo("w1", 4, busy=2, tier="A"))
    await bench.pass_s(LEASE_S / 2 + 1)
    assert await seen() == [WorkerInfo("w1", 4, busy=2, tier="A")]
    await bench.pass_s(LEASE_S / 2)
    assert await seen() == []


async def test_a_worker_that_leaves_hands_its_jobs_over_at_once(bench: Bench) -> None:
    gateway, leaving, staying = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await leaving.announce(WorkerInfo("w1", 4))
    await gateway.publish([bench.job(), bench.job()])
    [job, kept] = await leaving.take(2)
    await leaving.answer([Answer(kept.id, b"")])
    waiting = asyncio.ensure_future(staying.take(2))
    await asyncio.sleep(0.01)
    await leaving.leave()
    [again] = await asyncio.wait_for(waiting, LEASE_S - 1)
    assert (again.id, again.deliveries) == (job.id, 2)
    assert await gateway.workers() == []


async def test_a_worker_that_left_gets_nothing_more(bench: Bench) -> None:
    gateway, leaving, staying = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    await leaving.take(1)
    still_asking = asyncio.ensure_future(leaving.take(1))
    await asyncio.sleep(0.01)
    await leaving.leave()
    [again] = await asyncio.wait_for(staying.take(1), LEASE_S - 1)
    assert again.deliveries == 2
    assert not still_asking.done()
    still_asking.cancel()


async def test_a_cancelled_take_loses_no_job(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    taking = asyncio.ensure_future(worker.take(1))
    await asyncio.sleep(0.01)
    taking.cancel()
    await asyncio.wait([taking])
    job = bench.job()
    await gateway.publish([job])
    assert [taken.id for taken in await asyncio.wait_for(worker.take(1), 30)] == [job.id]


async def test_a_worker_takes_only_jobs_of_its_classes(bench: Bench) -> None:
    gateway, plain, strong = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await plain.announce(WorkerInfo("w1", 4, tier="C"))
    await strong.announce(WorkerInfo("w2", 4, needs=["python", "cpp"], tier="A"))
    jobs = {needs: bench.job(needs=needs) for needs in ("cpp", "python@B", "python", "python@D")}
    await gateway.publish(list(jobs.values()))
    taken = {job.needs for job in await plain.take(4)}
    if len(taken) == 1:
        taken |= {job.needs for job in await plain.take(4)}
    assert taken == {"python", "python@D"}
    assert {job.needs for _ in range(2) for job in await soon(strong.take(1))} == {"cpp", "python@B"}  # type: ignore[attr-defined]


async def test_an_expired_lease_is_handed_only_to_who_can_run_the_job(bench: Bench) -> None:
    gateway, plain, strong = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await plain.announce(WorkerInfo("w1", 4))
    await strong.announce(WorkerInfo("w2", 4, needs=["python", "cpp"]))
    await gateway.publish([bench.job(needs="cpp")])
    await strong.take(1)
    await bench.pass_s(LEASE_S + 0.1)
    assert await nothing_comes(plain.take(1))
    assert [job.deliveries for job in await soon(strong.take(1))] == [2]  # type: ignore[attr-defined]


async def test_jobs_that_wait_or_run_are_not_missing_and_others_are(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    jobs = [bench.job() for _ in range(3)]
    await gateway.publish(jobs)
    ids = [job.id for job in jobs]
    assert await gateway.missing(ids) == []
    [first, _] = await worker.take(2)
    assert await gateway.missing(ids) == []
    await worker.answer([Answer(first.id, b"")])
    assert await gateway.missing(ids) == [first.id]


async def test_a_job_handed_back_by_a_leaving_worker_can_be_cancelled_and_is_not_missing(bench: Bench) -> None:
    gateway, leaving, staying = await bench.gateway("g1"), await bench.worker("w1"), await bench.worker("w2")
    await gateway.publish([bench.job()])
    [job] = await leaving.take(1)
    await leaving.leave()
    assert await gateway.missing([job.id]) == []
    await gateway.cancel([job.id])
    assert await nothing_comes(staying.take(1))


async def test_what_is_taken_and_never_answered_leaves_nothing_behind() -> None:
    queue = MemoryQueue()
    gateway, worker = queue.gateway("g1"), queue.worker("w1")
    await gateway.publish([Job(f"j{number}", b"", 60_000, "g1") for number in range(100)])
    jobs = await worker.take(100)
    await gateway.cancel([job.id for job in jobs[1:]])
    await worker.renew([jobs[0].id])
    assert list(worker._reply_to) == [jobs[0].id]
    await worker.answer([Answer(jobs[0].id, b"")])
    assert not (worker._reply_to or queue.leases or queue.waiting)


async def test_a_job_that_is_leased_is_answered_even_if_its_worker_forgot_to_renew_it(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    await gateway.publish([bench.job()])
    [job] = await worker.take(1)
    await worker.renew([])
    await worker.answer([Answer(job.id, b"late")])
    assert [answer.payload for answer in await soon(gateway.receive())] == [b"late"]  # type: ignore[attr-defined]


async def test_a_waiting_worker_gets_a_job_whose_lease_expires_meanwhile() -> None:
    """On the real clock: nobody publishes or asks anew, the lapse itself wakes the one who waits."""
    queue = MemoryQueue()
    gateway, first, second = queue.gateway("g1"), queue.worker("w1"), queue.worker("w2")
    await gateway.publish([Job("j", b"", 60_000, "g1")])
    await first.take(1)
    queue.leases["j"].ends_at -= LEASE_S - 0.1
    [job] = await asyncio.wait_for(second.take(1), 30)
    assert job.deliveries == 2


# -- for one worker -----------------------------------------------------------------------------------------------------------


async def test_directed_job_reaches_its_worker_alone_and_once(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    first, second = await bench.worker("w1"), await bench.worker("w2")
    for worker, name in ((first, "w1"), (second, "w2")):
        await worker.announce(WorkerInfo(name, 4))
    job = bench.job()
    await gateway.publish_to("w2", job)
    [taken] = await asyncio.wait_for(second.take_directed(), 30)
    assert (taken.id, taken.payload, taken.reply_to) == (job.id, job.payload, "g1")
    for waiting in (first.take_directed(), second.take_directed(), first.take(4)):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.3)


async def test_answer_to_a_directed_job_reaches_its_gateway(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    worker = await bench.worker("w1")
    await worker.announce(WorkerInfo("w1", 4))
    job = bench.job()
    await gateway.publish_to("w1", job)
    await asyncio.wait_for(worker.take_directed(), 30)
    await worker.renew([job.id])
    await worker.answer([Answer(job.id, b"answer")])
    [answer] = await asyncio.wait_for(gateway.receive(), 30)
    assert (answer.id, answer.payload) == (job.id, b"answer")


async def test_directed_job_is_not_delivered_again_when_time_passes(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    first, second = await bench.worker("w1"), await bench.worker("w2")
    for worker, name in ((first, "w1"), (second, "w2")):
        await worker.announce(WorkerInfo(name, 4))
    await gateway.publish_to("w1", bench.job())
    await asyncio.wait_for(first.take_directed(), 30)
    await bench.pass_s(2 * LEASE_S)
    for waiting in (second.take(4), second.take_directed(), first.take_directed()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.3)


async def test_directed_job_for_a_worker_that_left_is_gone(bench: Bench) -> None:
    gateway = await bench.gateway("g1")
    worker = await bench.worker("w1")
    await worker.announce(WorkerInfo("w1", 4))
    await worker.leave()
    bench.ends.remove(worker)
    await gateway.publish_to("w1", bench.job())
    other = await bench.worker("w2")
    await other.announce(WorkerInfo("w2", 4))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other.take(1), 0.3)


async def test_a_job_that_cannot_be_read_is_answered_internal_error_and_the_next_one_runs(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    unreadable, good = bench.job(), bench.job()
    await gateway.publish([replace(unreadable, payload=b"\xc1"), replace(good, payload=pack(Call("x")))])
    async with Consumer("w1", EchoPool(WorkerConfig(slots=1)), worker):
        statuses: dict[str, str] = {}
        while len(statuses) < 2:
            answers = await asyncio.wait_for(gateway.receive(), 10)
            statuses |= {answer.id: unpack_result(answer.payload).status for answer in answers}
    bench.ends.remove(worker)
    assert statuses == {unreadable.id: "internal_error", good.id: "ok"}


class NoSessions:
    """There are none, and nobody asks for one."""

    live, most, memory_bytes = 0, 1, 0
    counts: dict[str, int] = {}


async def test_a_directed_job_that_cannot_be_read_is_refused_as_our_fault(bench: Bench) -> None:
    gateway, worker = await bench.gateway("g1"), await bench.worker("w1")
    job = replace(bench.job(), payload=b"\xc1")
    async with Consumer("w1", EchoPool(WorkerConfig(slots=1)), worker, NoSessions()):  # type: ignore[arg-type]
        await gateway.publish_to("w1", job)
        [answer] = await asyncio.wait_for(gateway.receive(), 10)
    bench.ends.remove(worker)
    reply = unpack_reply(answer.payload)
    assert answer.id == job.id and isinstance(reply, Refused) and reply.code == "internal"
