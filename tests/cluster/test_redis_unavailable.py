"""The server between gateways and workers is unavailable, full or has lost its data: accepted calls are kept and answered."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
from cluster_harness import Cluster, Door, cluster_on
from gateway_harness import problem, soon, until

from exec_wire import Result
from loadtest.support.processes import free_port
from loadtest.support.proxy import Proxy
from loadtest.support.redis_server import RedisServer

LONG = os.environ.get("EXEC_SLOW") == "1"  # the times of real life instead of short ones


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    if not LONG:
        monkeypatch.setattr("exec_wire.queue.connection.ANSWER_S", 1.0)
        monkeypatch.setattr("exec_wire.queue.connection.CONNECT_S", 0.5)
        monkeypatch.setattr("exec_service.dispatch.release.RECONCILE_S", 1.5)
        monkeypatch.setattr("exec_service.dispatch.release.RENEW_S", 0.3)


@pytest.fixture
async def cluster(own_server: RedisServer) -> AsyncIterator[Cluster]:
    async with cluster_on(own_server.url) as cluster:
        yield cluster


class Load:
    """Batches, one after the other, until it is stopped; every call has an output of its own."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._stop = asyncio.Event()
        self.sent: list[str] = []
        self.results: list[Result] = []
        self._tasks = [soon(self._run(number)) for number in range(4)]

    async def _run(self, which: int) -> None:
        turn = 0
        while not self._stop.is_set():
            codes = [f"{which}-{turn}-{number}" for number in range(25)]
            self.sent += codes
            self.results += await self._door.batch(*({"code": code} for code in codes))
            turn += 1

    async def stop(self, patience_s: float = 40.0) -> None:
        self._stop.set()
        await asyncio.wait_for(asyncio.gather(*self._tasks), patience_s)

    def check(self) -> None:
        """Every accepted call has one result, and it is the right one."""
        assert Counter(result.status for result in self.results) == {"ok": len(self.sent)}
        assert Counter(result.stdout for result in self.results) == Counter(self.sent)


async def is_well_again(door: Door, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        assert (await door.run("probe")).json()["status"] == "ok"
        await until(lambda: not door.gateway.dispatch.away_because, within_s)


async def under_load(cluster: Cluster, trouble: Callable[[], Awaitable[None]], url: str = "") -> Load:
    door = await cluster.add_gateway()
    async with cluster.echo_worker("w1", slots=8) as one, cluster.echo_worker("w2", slots=8) as two:
        load = Load(door)
        await until(lambda: len(load.results) > 50)
        await trouble()
        await is_well_again(door)
        seen = len(load.results)
        await until(lambda: len(load.results) > seen + 50, 20)
        await load.stop()
    load.check()
    for part in (door.gateway.supervisor, one._supervisor, two._supervisor):
        assert not any(part.failures.values()), part.failures  # an unavailable queue is no failure of a task
    return load


async def test_a_restart_of_the_server_loses_nothing(cluster: Cluster, own_server: RedisServer) -> None:
    async def restart() -> None:
        own_server.stop()
        await asyncio.sleep(1.5)
        own_server.start()

    await under_load(cluster, restart)


async def test_a_flush_of_everything_loses_nothing(cluster: Cluster, own_server: RedisServer) -> None:
    async def flush() -> None:
        for _ in range(2):
            own_server.say("FLUSHALL")
            await asyncio.sleep(0.3)

    await under_load(cluster, flush)


async def test_calls_that_were_flushed_are_published_again_long_before_they_are_old(
    cluster: Cluster, own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that has them is stuck, and leases are forgotten too: only the gateway can know that they are gone."""
    monkeypatch.setattr("exec_service.dispatch.release.RECONCILE_S", 60.0)
    monkeypatch.setattr("exec_service.dispatch.release.FORGOTTEN_S", 0.3)
    door = await cluster.add_gateway()
    worker = await cluster.add_worker(slots=4)
    await until(lambda: door.gateway.worker_registry.slots == 4)
    answering = soon(door.batch(*({"code": f"hold {number}"} for number in range(5))))
    await until(lambda: len(worker.jobs) == 4)
    own_server.say("FLUSHALL")
    async with cluster.echo_worker("w2", slots=8):
        results = await asyncio.wait_for(answering, 30)
    assert len(results) == 5 and {result.status for result in results} == {"ok"}


async def test_a_server_that_is_read_only_for_a_while_loses_nothing(cluster: Cluster, own_server: RedisServer) -> None:
    async def demote() -> None:
        own_server.say("REPLICAOF", "127.0.0.1", str(free_port()))
        await asyncio.sleep(2)
        own_server.say("REPLICAOF", "NO", "ONE")

    await under_load(cluster, demote)


async def test_a_server_whose_memory_is_full_loses_nothing(cluster: Cluster, own_server: RedisServer) -> None:
    async def fill() -> None:
        own_server.say("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: "memory" in cluster.doors[0].gateway.dispatch.away_because)
        await asyncio.sleep(1)
        own_server.say("CONFIG", "SET", "maxmemory", "0")

    await under_load(cluster, fill)


async def test_eviction_of_everything_loses_nothing(cluster: Cluster, own_server: RedisServer) -> None:
    async def evict() -> None:
        own_server.say("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        own_server.say("CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(1)
        own_server.say("CONFIG", "SET", "maxmemory", "0")

    await under_load(cluster, evict)


async def test_a_partition_loses_nothing(own_server: RedisServer) -> None:
    with Proxy(own_server.port) as proxy:
        async with cluster_on(proxy.url) as cluster:

            async def part() -> None:
                proxy.stall()
                await until(lambda: bool(cluster.doors[0].gateway.dispatch.away_because))
                await asyncio.sleep(30 if LONG else 2)
                proxy.go_on()

            await under_load(cluster, part)


async def test_broken_connections_lose_nothing(own_server: RedisServer) -> None:
    with Proxy(own_server.port) as proxy:
        async with cluster_on(proxy.url) as cluster:

            async def cut() -> None:
                for _ in range(5):
                    proxy.cut()
                    await asyncio.sleep(0.2)

            await under_load(cluster, cut)


async def test_while_the_server_is_away_calls_are_kept_until_there_is_no_room(own_server: RedisServer) -> None:
    async with cluster_on(own_server.url) as cluster:
        door = await cluster.add_gateway(max_calls=20, max_calls_per_request=20)
        own_server.stop()
        await until(lambda: bool(door.gateway.dispatch.away_because))
        kept = soon(door.batch(*({"code": f"{number}"} for number in range(15))))
        await until(lambda: door.gateway.dispatch.admission.calls == 15)
        assert (await door.client.get("/readyz")).status_code == 200
        refused = await door.client.post("/v1/batch", json={"calls": [{"code": "x"}] * 6})
        body = problem(refused, 503, "not_ready")
        assert "queue unavailable" in body["detail"] and int(refused.headers["retry-after"]) >= 1
        more = soon(door.batch(*({"code": f"{number}"} for number in range(15, 20))))
        await until(lambda: door.gateway.dispatch.admission.calls == 20)
        problem(await door.client.get("/readyz"), 503, "not_ready")
        assert (await door.client.get("/healthz")).status_code == 200
        own_server.start()
        async with cluster.echo_worker("w1"):
            results = [*await kept, *await more]
        assert sorted(int(result.stdout) for result in results) == list(range(20))


async def test_a_call_that_expires_while_the_server_is_away_is_answered(cluster: Cluster, own_server: RedisServer) -> None:
    door = await cluster.add_gateway()
    own_server.stop()
    result = (await door.run("x", deadline_s=0.5)).json()
    assert (result["status"], result["blame"], result["retryable"]) == ("expired", "infra", True)


async def test_gateway_and_worker_wait_for_a_server_that_is_not_there_yet(own_server: RedisServer) -> None:
    own_server.stop()
    async with cluster_on(own_server.url) as cluster:
        door = await cluster.add_gateway()
        async with cluster.echo_worker("w1"):
            answering = soon(door.run("x"))
            await asyncio.sleep(0.5)
            own_server.start()
            response: httpx.Response = await asyncio.wait_for(answering, 30)
    assert response.json()["stdout"] == "x"


async def test_cancelling_while_the_server_is_away_answers_what_is_here(cluster: Cluster, own_server: RedisServer) -> None:
    door = await cluster.add_gateway()
    own_server.stop()
    waiting = soon(door.run("x", tags={"run": "r"}))
    await until(lambda: door.gateway.dispatch.admission.calls == 1)
    assert (await door.client.delete("/v1/calls", params={"run": "r"})).json() == {"cancelled": 1}
    assert (await waiting).json()["status"] == "cancelled"
