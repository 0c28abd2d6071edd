"""What only a queue between processes has: records, other gateways, and a server that forgets or is full."""

import ast
import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from redis_harness import MovedServer

from exec_wire.messages.calls import Selection
from exec_wire.queue import connection
from exec_wire.queue import protocol as queue
from exec_wire.queue.protocol import (
    LEASE_S,
    Answer,
    Ask,
    GatewayQueue,
    Job,
    QueueUnavailable,
    WorkerInfo,
    fingerprint,
    record_name,
)
from exec_wire.queue.redis import RedisQueue
from exec_wire.queue.redis_entries import Address
from exec_wire.queue.redis_gateway import RedisGatewayEnd
from exec_wire.queue.redis_worker import RedisWorkerEnd


class Ends:
    def __init__(self, server: MovedServer) -> None:
        self.server, self.queue = server, RedisQueue(server.url)
        self._open: list[RedisGatewayEnd | RedisWorkerEnd] = []

    async def gateway(self, name: str = "g1") -> RedisGatewayEnd:
        end = self.queue.gateway(name)
        self._open.append(end)
        await end.announce(False)
        return end

    async def worker(self, name: str = "w1", **info: object) -> RedisWorkerEnd:
        end = self.queue.worker(name)
        self._open.append(end)
        await end.announce(WorkerInfo(name, 4, **info))  # type: ignore[arg-type]
        return end

    async def close(self) -> None:
        for end in self._open:
            await end.leave()


@pytest.fixture
async def ends(moved_server: MovedServer) -> AsyncIterator[Ends]:
    moved_server.say("FLUSHALL")
    ends = Ends(moved_server)
    yield ends
    await ends.close()


def job(id: str = "j1", **fields: object) -> Job:
    return Job(id, b"payload of " + id.encode(), 60_000, "g1", **fields)  # type: ignore[arg-type]


async def test_a_result_is_recorded_with_its_answer_for_every_gateway(ends: Ends) -> None:
    one, two, worker = await ends.gateway("g1"), await ends.gateway("g2"), await ends.worker()
    names = [record_name("t", key) for key in ("good", "bad", "other")]
    await one.publish([job("j1", record_as=names[0]), job("j2", record_as=names[1]), job("j3")])
    await worker.take(3)
    await worker.answer([Answer("j1", b"result", record=True), Answer("j2", b"infra"), Answer("j3", b"x", record=True)])
    assert await two.recorded(names) == [fingerprint(b"payload of j1") + b"result", None, None]
    await ends.server.pass_s(121)
    assert await two.recorded(names[:1]) == [None]


def test_no_pair_of_tenant_and_key_is_taken_for_another_one() -> None:
    pairs = [("a", "b:c"), ("a:b", "c"), ("", "abc"), ("abc", ""), ("1:a", "b"), ("1", "ab")]
    assert len({record_name(*pair) for pair in pairs}) == len(pairs)


async def test_a_worker_records_no_more_than_its_budget(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_wire.queue.redis_worker.RECORDED_BYTES", 15)
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job("j1", record_as="one"), job("j2", record_as="two"), job("j3", record_as="three")])
    await worker.take(3)
    await worker.answer([Answer(f"j{number}", b"ten bytes!" if number < 3 else b"4444", record=True) for number in (1, 2, 3)])
    assert [bool(kept) for kept in await gateway.recorded(["one", "two", "three"])] == [True, False, True]


async def test_gateways_know_how_many_others_have_calls_waiting(ends: Ends) -> None:
    one, two, three = [await ends.gateway(name) for name in ("g1", "g2", "g3")]

    async def waiting(gateway: GatewayQueue, backlog: bool) -> int:
        return sum(other.backlog for other in await gateway.announce(backlog))

    assert await waiting(one, True) == 0
    assert await waiting(two, True) == 1
    assert await waiting(three, False) == 2
    await ends.server.pass_s(LEASE_S + 0.1)
    assert await waiting(one, True) == 0
    await two.announce(True)
    assert await waiting(one, True) == 1
    await two.leave()
    assert await waiting(one, True) == 0


async def test_gateways_know_what_tenants_use_at_the_others_as_long_as_those_live(ends: Ends) -> None:
    one, two = [await ends.gateway(name) for name in ("g1", "g2")]
    await one.announce(False, {"lab": queue.TenantUse(3, 4.5, True)})
    [other] = await two.announce(False)
    assert (other.id, other.tenants) == ("g1", {"lab": queue.TenantUse(3, 4.5, True)})
    await ends.server.pass_s(LEASE_S + 0.1)
    assert await two.announce(False) == []


async def test_a_gateway_whose_heartbeat_cannot_be_read_is_ignored_and_counted_once(ends: Ends) -> None:
    one = await ends.gateway("g1")
    ends.server.say("SADD", "x1:gateways", "old")
    ends.server.say("SET", "x1:gateway:old", "1")
    assert await one.announce(False) == [] == await one.announce(False)
    assert one.unreadable["heartbeat"] == 1


async def test_other_gateways_are_asked_to_cancel_and_their_counts_are_summed(ends: Ends) -> None:
    gateways = [await ends.gateway(name) for name in ("g1", "g2", "g3")]
    asked: list[Selection] = []

    async def serve(gateway: RedisGatewayEnd, count: int) -> None:
        while True:
            for ask in await gateway.asked():
                asked.append(ask.selection)
                await gateway.tell(ask, count)

    tasks = [asyncio.create_task(serve(gateway, count)) for gateway, count in zip(gateways, (1, 20, 300), strict=True)]
    await asyncio.gather(*(gateway._notes.listen() for gateway in gateways))
    selection = Selection(run="r", step=3, tenant="t")
    assert await gateways[0].ask_others(selection) == 320
    assert asked == [selection, selection]
    for task in tasks:
        task.cancel()


async def test_a_gateway_that_does_not_answer_holds_up_a_cancellation_only_so_long(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_wire.queue.redis_gateway.ASK_S", 0.2)
    one, two = await ends.gateway("g1"), await ends.gateway("g2")
    await two._notes.listen()
    listening = asyncio.create_task(one.asked())
    assert await asyncio.wait_for(one.ask_others(Selection(run="r")), 30) == 0
    listening.cancel()


async def test_what_a_blocking_read_brings_too_much_is_handed_to_others_uncounted(ends: Ends) -> None:
    gateway, worker, other = (
        await ends.gateway(),
        await ends.worker(needs=["python", "cpp"]),
        await ends.worker("w2", needs=["cpp"]),
    )
    taking = asyncio.create_task(worker.take(1))
    await asyncio.sleep(0.1)
    await gateway.publish([job("j1"), job("j2", needs="cpp")])  # one script: both are there when the reader wakes
    [mine] = await asyncio.wait_for(taking, 30)
    rest = other if mine.id == "j1" else worker
    [theirs] = await asyncio.wait_for(rest.take(1), 30)
    assert {mine.id, theirs.id} == {"j1", "j2"}
    assert (mine.deliveries, theirs.deliveries) == (1, 1)


@pytest.mark.parametrize("needs", ["cpp", "python@B", "cpp@D"])
async def test_jobs_of_one_class_do_not_wait_for_a_flood_of_another_to_end(ends: Ends, needs: str) -> None:
    gateway, worker = await ends.gateway(), await ends.worker(needs=["python", "cpp"], tier="A")
    await gateway.publish([job(f"f{number}") for number in range(300)])
    for _ in range(20):
        await worker.take(1)
    await gateway.publish([job(f"rare{number}", needs=needs) for number in range(10)])
    taken = [taken.needs for _ in range(60) for taken in await worker.take(1)]
    assert taken.count(needs) == 10
    assert "python" in taken[-60:] and taken[taken.index(needs) :][:20].count("python") >= 8  # nor does the flood wait for them


async def test_answers_outlive_a_flush_of_everything(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job()])
    await worker.take(1)
    ends.server.say("FLUSHALL")
    await worker.answer([Answer("j1", b"result")])
    receiving = asyncio.create_task(gateway.receive())
    await gateway.announce(False)
    assert [answer.payload for answer in await asyncio.wait_for(receiving, 30)] == [b"result"]


async def test_answers_wait_for_each_other_while_all_slots_are_busy_and_travel_with_the_next_take(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_wire.queue.redis_worker.GATHER_S", 300.0)
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job(f"j{number}") for number in range(4)])
    await worker.take(4)
    answering = [asyncio.create_task(worker.answer([Answer(f"j{number}", b"x")])) for number in (0, 1)]
    await asyncio.sleep(0.1)
    assert ends.server.say("XLEN", "x1:reply@g1") == ":0\r\n"
    assert await worker.take(0, hold=1, wait=False) == []
    await asyncio.wait_for(asyncio.gather(*answering), 30)
    assert ends.server.say("XLEN", "x1:reply@g1") == ":1\r\n"
    assert [answer.id for answer in await asyncio.wait_for(gateway.receive(), 30)] == ["j0", "j1"]


async def test_an_answer_waits_for_no_other_while_the_worker_waits_for_jobs_or_has_none(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_wire.queue.redis_worker.GATHER_S", 300.0)
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job(f"j{number}") for number in range(2)])
    await worker.take(2)
    taking = asyncio.create_task(worker.take(1))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(worker.answer([Answer("j0", b"x")]), 30)
    await gateway.publish([job("j2")])
    await asyncio.wait_for(taking, 30)
    both = asyncio.gather(*(worker.answer([Answer(id, b"x")]) for id in ("j1", "j2")))
    await asyncio.wait_for(both, 30)
    assert len(await asyncio.wait_for(gateway.receive(), 30)) == 3


async def test_answers_under_way_to_a_server_that_is_lost_are_told_so_and_sent_again(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job("j1"), job("j2")])
    await worker.take(1, hold=1)
    ends.server.say("CLIENT", "PAUSE", "500")
    answering = [asyncio.create_task(worker.answer([Answer(id, b"x")])) for id in ("j1", "j2")]
    await asyncio.sleep(0.1)
    worker._commands._connection.lose("broken")  # type: ignore[union-attr]
    failed = await asyncio.wait_for(asyncio.gather(*answering, return_exceptions=True), 30)
    assert [isinstance(error, QueueUnavailable) for error in failed] == [True, True]
    await worker.answer([Answer("j1", b"x"), Answer("j2", b"x")])
    received: set[str] = set()
    while received != {"j1", "j2"}:
        received |= {answer.id for answer in await asyncio.wait_for(gateway.receive(), 30)}


async def test_jobs_published_after_a_flush_are_taken_by_who_was_waiting(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    taking = asyncio.create_task(worker.take(1))
    await asyncio.sleep(0.1)
    ends.server.say("FLUSHALL")
    await gateway.publish([job()])
    assert [taken.id for taken in await asyncio.wait_for(taking, 30)] == ["j1"]


async def test_answers_to_a_dead_gateway_are_dropped_and_its_stream_is_not_made_again(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job()])
    await worker.take(1)
    ends.server.say("DEL", "x1:reply@g1")
    await worker.answer([Answer("j1", b"result")])
    assert ends.server.say("EXISTS", "x1:reply@g1") == ":0\r\n"
    assert ends.server.say("XLEN", "x1:jobs:python") == ":0\r\n"


async def test_full_memory_refuses_new_jobs_and_lets_answers_and_leases_pass(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job("j1"), job("j2")])
    await worker.take(2)
    ends.server.say("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(QueueUnavailable, match="memory") as refused:
            await gateway.publish([job("j3")])
        assert not refused.value.sent
        assert await gateway.announce(True) == []
        await worker.announce(WorkerInfo("w1", 4))
        await worker.renew(["j1", "j2"])
        await worker.answer([Answer("j1", b"result")])
        assert [answer.id for answer in await asyncio.wait_for(gateway.receive(), 30)] == ["j1"]
    finally:
        ends.server.say("CONFIG", "SET", "maxmemory", "0")
    await gateway.publish([job("j3")])
    assert [taken.id for taken in await asyncio.wait_for(worker.take(2), 30)] == ["j3"]


async def test_a_server_that_is_a_replica_now_is_away(ends: Ends) -> None:
    gateway = await ends.gateway()
    ends.server.say("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(QueueUnavailable):
            await gateway.publish([job()])
    finally:
        ends.server.say("REPLICAOF", "NO", "ONE")
    await gateway.publish([job()])


async def test_a_clock_set_back_makes_no_job_late_and_no_deadline_longer(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job()])
    await ends.server.pass_s(-3600)
    [taken] = await asyncio.wait_for(worker.take(1), 30)
    assert taken.remaining_ms == 60_000
    await ends.server.pass_s(3600)


async def test_nothing_is_left_when_everybody_has_left(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job()])
    await worker.take(1)
    await worker.answer([Answer("j1", b"result")])
    await gateway.receive()
    await worker.leave()
    await gateway.leave()
    streams = ends.server.say("EVAL", "return table.concat(redis.call('KEYS', '*'), ' ')", "0")
    assert all(key.startswith("x1:jobs:") for key in streams.split()), streams
    assert ends.server.say("XLEN", "x1:jobs:python") == ":0\r\n"


# -- what cannot be read ------------------------------------------------------------------------------------------------------


JOBS = "x1:jobs:python"


def add(ends: Ends, *fields: str, key: str = JOBS) -> None:
    assert ends.server.say("XADD", key, "*", *fields).strip()


async def answered(worker: RedisWorkerEnd) -> list[str]:
    """The jobs that a worker takes and answers, by id, until the last one, `good`."""
    taken: list[str] = []
    while "good" not in taken:
        jobs = await asyncio.wait_for(worker.take(4), 10)
        await worker.answer([Answer(job.id, job.payload) for job in jobs])
        taken += [job.id for job in jobs]
    return taken


async def test_an_entry_tells_job_gateway_and_version_beside_the_packed_job(ends: Ends) -> None:
    gateway = await ends.gateway()
    await gateway.publish([job("the-job")])
    await gateway.publish_to("w1", job("directed"))
    for key, id in ((JOBS, "the-job"), ("x1:jobs@w1", "directed")):
        fields = "return table.concat(redis.call('XRANGE', KEYS[1], '-', '+')[1][2], ' ', 1, 6)"
        assert ends.server.say("EVAL", fields, "1", key) == f"v 1 id {id} to g1"


async def test_an_unreadable_entry_is_answered_through_its_fields_and_holds_up_no_other(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    add(ends, "v", "1", "id", "garbled", "to", "g1", "j", "no job")
    add(ends, "v", "1", "id", "empty", "to", "g1")
    await gateway.publish([job("good")])
    assert sorted(await answered(worker)) == ["empty", "garbled", "good"]
    received: dict[str, bytes] = {}
    while len(received) < 3:
        received |= {answer.id: answer.payload for answer in await asyncio.wait_for(gateway.receive(), 10)}
    assert received == {"garbled": b"", "empty": b"", "good": b"payload of good"}  # no worker can read an empty one
    assert ends.server.say("XLEN", JOBS) == ":0\r\n"
    assert worker.unreadable == {"payload": 2}


async def test_an_entry_without_an_address_is_removed_and_counted(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    add(ends, "j", "a job of nobody")
    add(ends, "v", "1", "id", "x", "j", "no gateway")
    add(ends, "v", "one", "id", "x", "to", "g1", "j", "no version")
    await gateway.publish([job("good")])
    assert await answered(worker) == ["good"]
    assert ends.server.say("XLEN", JOBS) == ":0\r\n"
    assert ends.server.say("EVAL", f"return redis.call('XPENDING', '{JOBS}', 'workers')[1]", "0") == ":0\r\n"
    assert worker.unreadable == {"unaddressed": 3}


async def test_an_entry_of_a_newer_version_is_left_to_workers_that_can_read_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    add(ends, "v", "2", "id", "newer", "to", "g1", "j", "of the future")
    await gateway.publish([job("good")])
    assert await answered(worker) == ["good"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.take(1), 2.5)  # more than one look at lapsed leases
    assert worker.unreadable == {"newer": 1}  # it was not taken again and again
    assert ends.server.say("XLEN", JOBS) == ":1\r\n"
    await worker.leave()  # it still asks for jobs, and could read this one from here on
    other = await ends.worker("w2")
    monkeypatch.setattr("exec_wire.queue.redis_worker.WIRE_VERSION", 2)
    [taken] = await asyncio.wait_for(other.take(1), 10)
    assert (taken.id, taken.deliveries) == ("newer", 1)


async def test_many_entries_of_a_newer_version_do_not_hide_a_lapsed_lease(ends: Ends) -> None:
    gateway, dead, worker = await ends.gateway(), await ends.worker("dead"), await ends.worker()
    for number in range(20):
        add(ends, "v", "2", "id", f"newer{number}", "to", "g1", "j", "of the future")
    await gateway.publish([job("good")])
    while not await asyncio.wait_for(dead.take(4), 10):
        pass
    await ends.server.pass_s(LEASE_S + 0.1)
    [taken] = await asyncio.wait_for(worker.take(2), 10)
    assert (taken.id, taken.deliveries) == ("good", 2)


async def test_directed_entries_that_cannot_be_read_are_answered_or_removed(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    for version in ("1", "2"):  # there is no other worker that could read the newer one
        add(ends, "v", version, "id", f"unreadable{version}", "to", "g1", "j", "garbage", key="x1:jobs@w1")
    add(ends, "j", "of nobody", key="x1:jobs@w1")
    await gateway.publish_to("w1", job("good"))
    taken = {job.id: job.payload for job in await asyncio.wait_for(worker.take_directed(), 10)}
    assert taken == {"unreadable1": b"", "unreadable2": b"", "good": b"payload of good"}
    assert worker.unreadable == {"payload": 2, "unaddressed": 1}


async def test_a_reply_that_cannot_be_read_loses_no_other_and_is_an_answer_without_contents(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job("good")])
    await worker.take(1)
    reply = "x1:reply@g1"
    add(ends, "v", "1", "id", "j7 j8", "a", "garbage", key=reply)
    add(ends, "v", "2", "id", "j9", "a", "of the future", key=reply)
    add(ends, "a", "garbage", key=reply)
    await worker.answer([Answer("good", b"result")])
    received: dict[str, bytes] = {}
    while len(received) < 4:
        received |= {answer.id: answer.payload for answer in await asyncio.wait_for(gateway.receive(), 10)}
    assert received == {"j7": b"", "j8": b"", "j9": b"", "good": b"result"}
    assert gateway.unreadable == {"answer": 3}


@pytest.mark.parametrize("value", ["no json", "{}", '{"id": "bad", "slots": -1}', None])
async def test_one_malformed_heartbeat_does_not_hide_the_other_workers(ends: Ends, value: str | None) -> None:
    gateway, _ = await ends.gateway(), await ends.worker("good")
    ends.server.say("SADD", "x1:workers", "bad")
    if value is None:
        ends.server.say("HSET", "x1:worker:bad", "slots", "4")
    else:
        ends.server.say("SET", "x1:worker:bad", value)
    for _ in range(3):
        assert [info.id for info in await gateway.workers()] == ["good"]
    assert gateway.unreadable == {"heartbeat": 1}


async def test_a_message_of_another_gateway_that_cannot_be_read_is_counted(ends: Ends) -> None:
    gateway = await ends.gateway()
    await gateway._notes.listen()
    asking = asyncio.create_task(gateway.asked())
    asks = Address(ends.server.url).asks
    ends.server.say("PUBLISH", asks, "garbage")
    other = await ends.gateway("g2")
    await other._commands.call(("PUBLISH", asks, msgspec.msgpack.encode(Ask("g2", "a", Selection(run="r")))))
    assert [ask.id for ask in await asyncio.wait_for(asking, 10)] == ["a"]
    assert gateway.unreadable == {"ask": 1}


async def test_an_error_that_nobody_knows_is_an_unavailable_queue_and_not_the_end_of_a_loop(ends: Ends) -> None:
    gateway, worker = await ends.gateway(), await ends.worker()
    await gateway.publish([job("j1")])
    ends.server.say("DEL", JOBS)
    ends.server.say("SET", JOBS, "a text")
    with pytest.raises(QueueUnavailable, match="WRONGTYPE"):
        await worker.take(1)
    with pytest.raises(QueueUnavailable, match="WRONGTYPE"):
        await gateway.publish([job("j2")])
    ends.server.say("DEL", JOBS)
    await gateway.publish([job("j3")])
    assert [taken.id for taken in await asyncio.wait_for(worker.take(1), 5)] == ["j3"]


def test_no_private_part_of_redis_py_or_hiredis_is_used() -> None:
    """Every private name that the module reads is one that it sets or defines itself."""
    nodes = list(ast.walk(ast.parse(Path(connection.__file__).read_text())))
    private = [node for node in nodes if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)]
    own = {node.attr for node in private if isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own.add("_replace")  # of a NamedTuple
    assert {node.attr for node in private} <= own
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [name for node in imports for name in [*str(node.module).split("."), *(alias.name for alias in node.names)]]
    assert [name for name in names if name.startswith("_") and name != "__future__"] == []
