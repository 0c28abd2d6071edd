"""A queue that is several real servers: where calls go, and what a server that is lost, silent or new means for the others."""

import asyncio
import itertools
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest
from cluster_harness import Cluster, cluster_on
from gateway_harness import until

from exec_service.config import ConfigError, GatewayConfig, JobsWorkerConfig
from exec_wire.messages.calls import Selection
from exec_wire.queue import sharded_gateway
from exec_wire.queue.protocol import Answer, GatewayQueue, Job, QueueUnavailable, WorkerInfo, WorkerQueue, record_name
from exec_wire.queue.redis import RedisQueue
from exec_wire.queue.shards import owner
from exec_wire.queue.urls import read_urls, split
from loadtest.support.redis_server import RedisServer

NAMES = ("one", "two", "three")


class Servers:
    """Three servers, as one queue."""

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        self.servers = dict(zip(NAMES, servers, strict=True))

    @property
    def urls(self) -> str:
        return self.urls_of(*NAMES)

    def urls_of(self, *names: str) -> str:
        return ",".join(f"{self.servers[name].url}#{name}" for name in names)

    def __getitem__(self, name: str) -> RedisServer:
        return self.servers[name]

    def commands(self) -> dict[str, int]:
        """How many commands each has executed. Those that its connections make to see that it lives do not count."""
        found = {}
        for name, server in self.servers.items():
            stats = dict(re.findall(r"cmdstat_([\w|]+):calls=(\d+)", server.say("INFO", "commandstats")))
            found[name] = sum(int(calls) for command, calls in stats.items() if command in ("xadd", "xack", "xdel", "set"))
        return found

    @asynccontextmanager
    async def without(self, name: str) -> AsyncIterator[None]:
        """It is killed, and comes back empty."""
        self[name].stop()
        try:
            yield
        finally:
            await asyncio.to_thread(self[name].start)

    @asynccontextmanager
    async def silent(self, name: str) -> AsyncIterator[None]:
        os.kill(self[name].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self[name].pid, signal.SIGCONT)


@pytest.fixture
def servers(redis_path: str) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers([stack.enter_context(RedisServer()) for _ in NAMES])


class Ends:
    def __init__(self, urls: str) -> None:
        self.urls = urls
        self._open: list[GatewayQueue | WorkerQueue] = []

    async def gateway(self, name: str = "g1", urls: str = "") -> GatewayQueue:
        end = RedisQueue(urls or self.urls).gateway(name)
        self._open.append(end)
        await end.announce(False)
        await end.workers()
        return end

    async def worker(self, name: str = "w1", urls: str = "", **info: object) -> WorkerQueue:
        end = RedisQueue(urls or self.urls).worker(name)
        self._open.append(end)
        await end.announce(WorkerInfo(name, 4, **info))  # type: ignore[arg-type]
        return end


@pytest.fixture
async def ends(servers: Servers) -> AsyncIterator[Ends]:
    ends = Ends(servers.urls)
    yield ends
    for end in ends._open:
        await end.leave()


@pytest.fixture
async def sharded(servers: Servers) -> AsyncIterator[Cluster]:
    async with cluster_on(servers.urls) as cluster:
        yield cluster


def job(id: str, **fields: object) -> Job:
    return Job(id, b"payload of " + id.encode(), 60_000, "g1", **fields)  # type: ignore[arg-type]


def named_for(shard: str) -> str:
    """The name of a record that this shard owns."""
    return next(name for name in map(str, range(1000)) if owner(name, NAMES) == shard)


def keyed_for(shard: str, number: int = 0) -> str:
    """An idempotency key of such a record."""
    keys = (f"key {count}" for count in itertools.count())
    return next(itertools.islice((key for key in keys if owner(record_name("", key), NAMES) == shard), number, None))


async def take_all(worker: WorkerQueue, count: int) -> list[Job]:
    taken: list[Job] = []
    while len(taken) < count:
        taken += await asyncio.wait_for(worker.take(count - len(taken)), 30)
    return taken


# -- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.one_server
def test_urls_are_separated_by_commas_and_a_password_may_contain_one() -> None:
    assert split("redis://:a,b@one:1/0, rediss://two:2/1,unix:///three") == [
        "redis://:a,b@one:1/0",
        "rediss://two:2/1",
        "unix:///three",
    ]
    shards = read_urls("redis://:secret@one/2,redis://two:7000#b,redis://three:1/0?former=1,unix:///run/four")
    assert [(shard.name, shard.former) for shard in shards] == [
        ("one:6379/2", False),
        ("b", False),
        ("three:1/0", True),
        ("unix:///run/four", False),
    ]
    assert [shard.url for shard in shards][1:3] == ["redis://two:7000", "redis://three:1/0"]


@pytest.mark.parametrize("urls", ["redis://one/0,redis://one:6379", "redis://one#a,redis://two#a", "redis://one?former=1"])
def test_servers_that_cannot_be_told_apart_and_a_queue_without_one_are_refused(urls: str) -> None:
    with pytest.raises(ValueError, match=r"named twice|none would get calls"):
        RedisQueue(urls)


def test_bulk_jobs_of_a_queue_of_several_servers_need_one_of_their_own() -> None:
    several = "redis://one,redis://two"
    with pytest.raises(ConfigError, match="EXEC_JOBS_REDIS"):
        GatewayConfig(redis=several, jobs_dir="/jobs")
    with pytest.raises(ConfigError, match="EXEC_JOBS_REDIS"):
        JobsWorkerConfig(redis=several, jobs_dir="/jobs")
    assert GatewayConfig(redis=several, jobs_dir="/jobs", jobs_redis="redis://three").jobs_broker == "redis://three"


def test_a_new_shard_takes_its_part_of_the_names_and_no_other_name_moves() -> None:
    names = [str(number) for number in range(6000)]
    before, after = ({name: owner(name, shards) for name in names} for shards in (NAMES, (*NAMES, "four")))
    moved = {name for name in names if before[name] != after[name]}
    assert {after[name] for name in moved} == {"four"}
    assert all(abs(count - 1500) < 150 for count in Counter(after.values()).values())


# -- where calls go -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [True, False])
async def test_each_of_three_servers_carries_a_third_of_the_commands(servers: Servers, sharded: Cluster, keyed: bool) -> None:
    async with sharded.echo_worker("w1", slots=64), sharded.echo_worker("w2", slots=64):
        door = await sharded.add_gateway()
        before = servers.commands()
        for first in range(0, 6000, 1500):
            calls = [{"code": f"c{number}"} for number in range(first, first + 1500)]
            results = await door.batch(*[call | ({"idempotency_key": call["code"]} if keyed else {}) for call in calls])
            assert sorted(result.stdout for result in results) == sorted(call["code"] for call in calls)
        grown = {name: count - before[name] for name, count in servers.commands().items()}
    mean = sum(grown.values()) / 3
    assert all(abs(count - mean) <= 0.1 * mean for count in grown.values()), grown


async def test_a_job_is_published_only_where_a_live_worker_of_its_class_announces_itself(servers: Servers, ends: Ends) -> None:
    await ends.worker("w1", urls=servers.urls_of("two"))
    await ends.worker("w2", urls=servers.urls_of("two", "three"), needs=["cpp"])
    gateway = await ends.gateway()
    assert gateway.shards is not None
    assert [name for name in NAMES if gateway.shards.is_open(name, "python")] == ["two"]
    assert [name for name in NAMES if gateway.shards.is_open(name, "cpp")] == ["two", "three"]
    assert not gateway.shards.is_open("", "java")
    await gateway.publish([job(f"j{number}") for number in range(6)])
    assert [servers[name].say("XLEN", "x1:jobs:python") for name in NAMES] == [":0\r\n", ":6\r\n", ":0\r\n"]


async def test_workers_and_gateways_are_counted_once(ends: Ends) -> None:
    await ends.worker("w1")
    await ends.worker("w2")
    gateway = await ends.gateway("g1")
    await ends.gateway("g2")
    assert [info.id for info in await gateway.workers()] == ["w1", "w2"]
    assert [other.id for other in await gateway.announce(True)] == ["g2"]


async def test_one_slot_gets_one_job_though_every_server_has_one(servers: Servers, ends: Ends) -> None:
    worker = await ends.worker()
    gateway = await ends.gateway()
    taking = asyncio.create_task(worker.take(1))
    await asyncio.sleep(0.3)  # it waits at all three
    await gateway.publish([job(f"j{number}", record_as=named_for(name)) for number, name in enumerate(NAMES)])
    first = await asyncio.wait_for(taking, 10)
    assert len(first) == 1
    other = await ends.worker("w2")
    rest = await take_all(other, 2)  # also those that a read brought too much
    assert {taken.id for taken in [*first, *rest]} == {"j0", "j1", "j2"}
    assert [taken.deliveries for taken in [*first, *rest]] == [1, 1, 1]


async def test_jobs_that_come_while_nobody_takes_go_to_another_worker(ends: Ends) -> None:
    worker = await ends.worker()
    gateway = await ends.gateway()
    taking = asyncio.create_task(worker.take(4))
    await asyncio.sleep(0.3)
    taking.cancel()
    await asyncio.wait([taking])
    await gateway.publish([job(f"j{number}", record_as=named_for(name)) for number, name in enumerate(NAMES)])
    assert {taken.id for taken in await take_all(await ends.worker("w2"), 3)} == {"j0", "j1", "j2"}


async def test_jobs_of_a_session_reach_its_worker_by_one_server_alone(servers: Servers, ends: Ends) -> None:
    worker = await ends.worker("w1", urls=servers.urls_of("two", "three"))
    gateway = await ends.gateway()
    for number in range(8):
        await gateway.publish_to("w1", job(f"c{number}"), pin="session")
    taken: list[str] = []
    while len(taken) < 8:
        taken += [cell.id for cell in await asyncio.wait_for(worker.take_directed(), 10)]
    assert taken == [f"c{number}" for number in range(8)]
    used = [name for name in NAMES if "cmdstat_expire:" in servers[name].say("INFO", "commandstats")]
    by = owner("session", ["two", "three"])
    assert by in used
    async with servers.without(by):
        with pytest.raises(QueueUnavailable):
            await gateway.publish_to("w1", job("c8"), pin="session")
        with pytest.raises(TimeoutError):  # on no other way
            await asyncio.wait_for(worker.take_directed(), 1.5)


async def test_other_gateways_are_asked_once(ends: Ends) -> None:
    one, two = await ends.gateway("g1"), await ends.gateway("g2")

    async def serve() -> None:
        while True:
            for ask in await two.asked():
                await two.tell(ask, 7)

    serving, hearing = asyncio.create_task(serve()), asyncio.create_task(one.asked())
    await asyncio.sleep(0.5)
    assert await one.ask_others(Selection(run="r")) == 7
    for task in (serving, hearing):
        task.cancel()


# -- a change of the servers ----------------------------------------------------------------------------------------------


async def test_a_record_is_found_after_servers_were_added(servers: Servers, ends: Ends) -> None:
    names = [named_for(name) for name in NAMES]
    before = await ends.gateway("g1", urls=servers.urls_of("one"))
    worker = await ends.worker("w1")
    await before.publish([job(name, record_as=name) for name in names])
    await worker.answer([Answer(taken.id, b"result", record=True) for taken in await take_all(worker, 3)])
    after = await ends.gateway("g2")
    assert all(await after.recorded(names))


async def test_all_servers_are_asked_for_records_as_long_as_another_gateway_knows_other_servers(
    servers: Servers, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_gateway, "RECORD_S", 0.3)
    after = await ends.gateway("g2")
    name = named_for("two")
    servers["one"].say("SET", f"x1:idem:{name}", "record")
    assert await after.recorded([name]) == [b"record"]
    await asyncio.sleep(0.4)
    assert await after.recorded([name]) == [None]
    await ends.gateway("g1", urls=servers.urls_of("one"))
    await after.announce(False)
    assert await after.recorded([name]) == [b"record"]


async def test_a_former_server_gets_no_job_and_its_records_and_jobs_are_not_lost(servers: Servers, ends: Ends) -> None:
    urls = f"{servers.urls_of('one', 'two')},{servers['three'].url}?former=1#three"
    before = await ends.gateway("g1")
    after = await ends.gateway("g2", urls=urls)
    worker = await ends.worker("w1", urls=urls)
    await before.publish([job("old", record_as=named_for("three"))])
    await after.publish([job(f"j{number}", record_as=str(number)) for number in range(60)])
    assert servers["three"].say("XLEN", "x1:jobs:python") == ":1\r\n"
    jobs = await take_all(worker, 61)
    await worker.answer([Answer(taken.id, b"result", record=True) for taken in jobs])
    assert await after.recorded([named_for("three")]) != [None]


async def test_a_rolling_change_from_one_server_to_three_loses_nothing(servers: Servers) -> None:
    """Workers first, then gateways, under load."""
    async with AsyncExitStack() as stack, cluster_on(servers.urls_of("one")) as cluster:
        small = [await stack.enter_async_context(cluster.echo_worker(f"small {number}")) for number in range(2)]
        door = await cluster.add_gateway()
        done, stop = Counter[str](), asyncio.Event()

        async def load() -> None:
            number = 0
            while not stop.is_set():
                calls = [{"code": f"c{number + one}", "idempotency_key": f"k{number + one}"} for one in range(50)]
                for result in await door.batch(*calls):
                    assert result.status == "ok"
                    done[result.stdout] += 1
                number += 50

        loading = asyncio.create_task(load())
        await until(lambda: len(done) > 200, 30)
        cluster.url = servers.urls
        large = [await stack.enter_async_context(cluster.echo_worker(f"large {number}")) for number in range(2)]
        for consumer in small:
            await consumer.drain(5)
        second = await cluster.add_gateway()
        await until(lambda: second.gateway.worker_registry.slots == 8, 30)
        seen, door = len(done), second
        await until(lambda: len(done) > seen + 500 or loading.done(), 30)
        stop.set()
        await loading
        assert set(done.values()) == {1}
        assert sum(consumer.taken for consumer in large) > 500 and min(servers.commands().values()) > 100


# -- a server that is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["without", "silent"])
async def test_a_lost_server_delays_only_its_own_calls(servers: Servers, sharded: Cluster, fault: str) -> None:
    async with sharded.echo_worker("w1", slots=2):
        door = await sharded.add_gateway()
        assert {result.status for result in await door.batch(*[{"code": "x"}] * 30)} == {"ok"}
        async with getattr(servers, fault)("two"):
            keyed = {name: {"code": name, "idempotency_key": keyed_for(name)} for name in NAMES}
            own = asyncio.create_task(door.batch(keyed["two"]))
            async with asyncio.timeout(20):
                for _ in range(5):
                    results = await door.batch(*[{"code": "x"}] * 40, keyed["one"], keyed["three"])
                    assert {result.status for result in results} == {"ok"}
            assert not own.done()
            await until(lambda: not door.gateway.dispatch.waiting.count, 10)
        assert [result.stdout for result in await asyncio.wait_for(own, 40)] == ["two"]


async def test_unsent_answers_for_a_lost_server_do_not_hold_up_the_others(servers: Servers, sharded: Cluster) -> None:
    async with sharded.echo_worker("w1", slots=2) as consumer:
        door = await sharded.add_gateway()
        consumer._pool._takes_s = 1.0  # type: ignore[union-attr]
        kept = [{"code": "kept", "idempotency_key": keyed_for("two", number)} for number in range(2)]
        own = asyncio.create_task(door.batch(*kept))
        await until(lambda: len(consumer._running) == 2, 10)
        async with servers.silent("two"):
            await until(lambda: consumer._pool.free_slots == 2, 10)
            consumer._pool._takes_s = 0  # type: ignore[union-attr]
            keys = [keyed_for(name, number) for name in ("one", "three") for number in range(20)]
            calls = [{"code": "x", "idempotency_key": key} for key in keys]
            assert len(await asyncio.wait_for(door.batch(*calls), 20)) == 40
            assert not own.done()
        assert [result.stdout for result in await asyncio.wait_for(own, 40)] == ["kept"] * 2
        later = {"code": "later", "idempotency_key": keyed_for("two", 2)}
        assert [result.stdout for result in await asyncio.wait_for(door.batch(later), 20)] == ["later"]


async def test_calls_that_a_server_forgot_are_published_again(servers: Servers, sharded: Cluster) -> None:
    door = await sharded.add_gateway()
    worker = await sharded.add_worker("w1", slots=30)
    calls = asyncio.create_task(door.batch(*[{"code": "hold"}] * 9))
    await until(lambda: len(worker.jobs) == 9, 20)
    servers["two"].say("FLUSHALL")
    worker.let_go.set()
    assert {result.status for result in await asyncio.wait_for(calls, 30)} == {"ok"}
    again = asyncio.create_task(door.batch(*[{"code": f"say {name}", "idempotency_key": keyed_for(name)} for name in NAMES]))
    assert {result.stdout for result in await asyncio.wait_for(again, 30)} == set(NAMES)
