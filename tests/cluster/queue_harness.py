"""One queue under test: in memory or on a real server, with time that passes without waiting."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis_harness import MovedServer

from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import GatewayQueue, Job, WorkerQueue
from exec_wire.queue.redis import RedisQueue

ONE, SEVERAL, CLUSTER, SHARDS = "one server", "3 shards", "cluster", 3


def cluster_url(server: MovedServer, shards: int) -> str:
    return f"redis+cluster://127.0.0.1:{server.port}/?shards={shards}"


def shards_of(server: MovedServer, count: int) -> str:
    return ",".join(f"redis://127.0.0.1:{server.port}/{database}" for database in range(count))


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """One queue under test: `gateway(name)` and `worker(name)` open ends, `pass_s` lets time go by."""

    open_gateway: Callable[[str], GatewayQueue]
    open_worker: Callable[[str], WorkerQueue]
    pass_s: Callable[[float], Awaitable[None]]
    ends: list[GatewayQueue | WorkerQueue] = field(default_factory=list)
    numbers: list[int] = field(default_factory=lambda: [0])
    shards: int = 1

    def in_order(self, jobs: Sequence[Job]) -> list[str]:
        """Their ids. Several servers keep the order only within each, so there it says nothing."""
        ids = [job.id for job in jobs]
        return ids if self.shards == 1 else sorted(ids)

    async def gateway(self, name: str) -> GatewayQueue:
        end = self.open_gateway(name)
        self.ends.append(end)
        await end.announce(False)
        return end

    async def worker(self, name: str) -> WorkerQueue:
        end = self.open_worker(name)
        self.ends.append(end)
        return end

    def job(self, reply_to: str = "g1", remaining_ms: int = 60_000, needs: str = "python") -> Job:
        self.numbers[0] += 1
        return Job(f"job-{self.numbers[0]}", b"payload %d" % self.numbers[0], remaining_ms, reply_to, needs)

    async def close(self) -> None:
        for end in self.ends:
            await end.leave()


@asynccontextmanager
async def memory_bench() -> AsyncIterator[Bench]:
    clock = Clock()
    queue = MemoryQueue(clock)

    async def pass_s(seconds: float) -> None:
        clock.now += seconds

    yield Bench(queue.gateway, queue.worker, pass_s)


@asynccontextmanager
async def redis_bench(server: MovedServer, kind: str = ONE) -> AsyncIterator[Bench]:
    """Several shards share the clock of one server: they are its databases, or have all their keys there."""
    server.say("FLUSHALL")
    shards = 1 if kind == ONE else SHARDS
    urls = {ONE: server.url, SEVERAL: shards_of(server, SHARDS), CLUSTER: cluster_url(server, SHARDS)}
    queue = RedisQueue(urls[kind])

    bench = Bench(queue.gateway, queue.worker, server.pass_s, shards=shards)
    try:
        yield bench
    finally:
        await bench.close()


async def soon(waiting: Awaitable[object]) -> object:
    return await asyncio.wait_for(waiting, 30)


async def nothing_comes(waiting: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(waiting, 0.05)
    except TimeoutError:
        return True
    return False
