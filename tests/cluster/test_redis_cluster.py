"""A real Redis Cluster of three primaries, each with a replica: primaries that are lost, and slots that move."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
from cluster_harness import Cluster, cluster_on
from gateway_harness import until

from exec_wire.queue.connection import Link
from exec_wire.queue.protocol import Answer, Job, QueueUnavailable, WorkerInfo, WorkerQueue
from exec_wire.queue.redis import RedisQueue
from exec_wire.queue.redis_entries import Address
from exec_wire.queue.urls import read_urls, slot_of, tag_of
from loadtest.support.redis_cluster import RedisCluster
from loadtest.support.redis_server import RedisServer

SHARDS = range(3)


@pytest.fixture
def redis_cluster(redis_path: str) -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
async def on_cluster(redis_cluster: RedisCluster) -> AsyncIterator[Cluster]:
    async with cluster_on(redis_cluster.url) as cluster:
        yield cluster


def owner_of(cluster: RedisCluster, shard: int) -> RedisServer:
    """The primary of a shard."""
    return next(one for one in cluster.primaries if f":{one.port}@" in _line_with(one, slot_of(tag_of(shard))))


def _line_with(server: RedisServer, slot: int) -> str:
    for line in server.say("CLUSTER", "NODES").splitlines():
        for part in line.split()[8:]:
            first, _, last = part.partition("-")
            if first.isdecimal() and int(first) <= slot <= int(last or first):
                return line
    raise AssertionError(f"nobody has slot {slot}")


def move(cluster: RedisCluster, shard: int, to: RedisServer, *, finish: bool) -> None:
    """Move the slot of a shard with its keys; without `finish` both servers answer for it until it is called again."""
    slot, source = str(slot_of(tag_of(shard))), owner_of(cluster, shard)
    to.say("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
    source.say("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(to))
    while keys := keys_of(source, slot):
        for key in keys:
            assert "OK" in source.say("MIGRATE", "127.0.0.1", str(to.port), key, "0", "5000")
    if finish:
        for server in (to, *cluster.primaries):
            assert server.say("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(to)).startswith("+OK")


def keys_of(server: RedisServer, slot: str) -> list[str]:
    text = "local found = redis.call('KEYS', '*') return table.concat(found, ' ')"
    if server.say("CLUSTER", "COUNTKEYSINSLOT", slot).startswith(":0"):
        return []
    tag = next(tag_of(shard) for shard in SHARDS if slot == str(slot_of(tag_of(shard))))
    return [key for key in server.say("EVAL", text, "0").split() if f"{{{tag}}}" in key]


@pytest.mark.one_server
def test_each_shard_is_on_a_primary_of_its_own(redis_cluster: RedisCluster) -> None:
    assert {owner_of(redis_cluster, shard) for shard in SHARDS} == set(redis_cluster.primaries)


@pytest.mark.parametrize("url", ["redis+cluster://one/1?shards=3", "redis+cluster://one", "redis://one?shards=3"])
def test_another_database_and_a_missing_number_of_shards_are_refused_with_the_reason(url: str) -> None:
    with pytest.raises(ValueError, match=r"database 0 only|number of shards|is of redis\+cluster"):
        RedisQueue(url)


@pytest.mark.one_server
async def test_a_server_of_a_cluster_named_alone_is_unavailable_with_the_remedy(
    redis_cluster: RedisCluster,
) -> None:
    gateways = [RedisQueue(server.url).gateway("g") for server in redis_cluster.primaries]
    with pytest.raises(QueueUnavailable, match=r"redis\+cluster://"):
        for gateway in gateways:
            await gateway.announce(False)
    for gateway in gateways:
        await gateway.leave()


async def test_jobs_of_a_slot_that_moves_are_answered_once(redis_cluster: RedisCluster) -> None:
    """While it moves, a command whose keys are not all at one server is refused, and sent again later."""
    queue = RedisQueue(redis_cluster.url)
    gateway, worker = queue.gateway("g1"), queue.worker("w1")
    await worker.announce(WorkerInfo("w1", 4))
    await gateway.announce(False)
    await gateway.workers()
    answered: list[str] = []
    for turn in range(2):
        await gateway.publish([Job(f"{turn}-{number}", b"x", 60_000, "g1") for number in range(9)])
        source = owner_of(redis_cluster, 0)
        target = next(one for one in redis_cluster.primaries if one is not source)
        await asyncio.to_thread(move, redis_cluster, 0, target, finish=False)
        serving = asyncio.create_task(answer_all(worker, 9))
        await asyncio.sleep(1)
        await asyncio.to_thread(move, redis_cluster, 0, target, finish=True)
        await asyncio.wait_for(serving, 30)
        while len(answered) < 9 * (turn + 1):
            answered += [answer.id for answer in await asyncio.wait_for(gateway.receive(), 30)]
    assert len(answered) == len(set(answered)) == 18
    await worker.leave()
    await gateway.leave()


async def answer_all(worker: WorkerQueue, count: int) -> None:
    jobs: list[Job] = []
    while count:
        try:
            jobs = jobs or await worker.take(4, wait=False)
            for job in list(jobs):
                await worker.answer([Answer(job.id, b"")])
                jobs.remove(job)
                count -= 1
        except QueueUnavailable:
            pass
        await asyncio.sleep(0.05)


async def test_a_command_follows_its_slot_and_is_executed_once(redis_cluster: RedisCluster) -> None:
    """By MOVED after the slot has moved, by ASK while it moves."""
    shard = read_urls(redis_cluster.url)[0]
    link, key = Link(Address(shard.url, shard.tag).server), f"x1:{{{shard.tag}}}:number"
    source = owner_of(redis_cluster, 0)
    others = [one for one in redis_cluster.primaries if one is not source]
    assert await link.call(("INCR", key)) == [1]
    await asyncio.to_thread(move, redis_cluster, 0, others[0], finish=True)
    assert await link.call(("INCR", key)) == [2]
    await asyncio.to_thread(move, redis_cluster, 0, others[1], finish=False)
    assert await link.call(("INCR", key), ("INCR", key)) == [3, 4]
    await link.close()


async def test_calls_go_on_and_none_is_lost_when_a_primary_is_killed(redis_cluster: RedisCluster, on_cluster: Cluster) -> None:
    async with on_cluster.echo_worker("w1"), on_cluster.echo_worker("w2"):
        door = await on_cluster.add_gateway()
        done, stop = Counter[str](), asyncio.Event()

        async def load() -> None:
            number = 0
            while not stop.is_set():
                calls = [{"code": f"c{number + one}", "idempotency_key": f"k{number + one}"} for one in range(50)]
                for result in await door.batch(*calls):
                    assert result.status == "ok", result
                    done[result.stdout] += 1
                number += 50

        loading = asyncio.create_task(load())
        await until(lambda: len(done) > 200 or loading.done(), 30)
        owner_of(redis_cluster, 1).stop()
        async with asyncio.timeout(30):  # calls of the other primaries, without a key
            assert {result.status for result in await door.batch(*[{"code": "x"}] * 30)} == {"ok"}
        seen = len(done)
        await until(lambda: len(done) > seen + 300 or loading.done(), 60)
        stop.set()
        await asyncio.wait_for(loading, 60)
        assert set(done.values()) == {1}
