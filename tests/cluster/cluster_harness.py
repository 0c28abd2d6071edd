"""Gateways and workers of a cluster in this process, and a real server between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
from gateway_harness import ScriptedWorker, lines, serving

from exec_service.app import Gateway
from exec_service.config import GatewayConfig
from exec_wire import Result
from exec_wire.queue.redis import RedisQueue
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.echo import EchoPool


@dataclass
class Door:
    """One gateway and a client of it."""

    gateway: Gateway
    client: httpx.AsyncClient
    stop: asyncio.Event

    async def run(self, code: str = "say hi", **fields: object) -> httpx.Response:
        return await self.client.post("/v1/run", json={"code": code, **fields})

    async def batch(self, *calls: object) -> list[Result]:
        return lines(await self.client.post("/v1/batch", json={"calls": list(calls)}))


@dataclass
class Cluster:
    url: str
    stack: AsyncExitStack
    doors: list[Door] = field(default_factory=list)

    async def add_gateway(self, **settings: object) -> Door:
        defaults: dict[str, object] = {"port": 0, "grpc_port": 0, "workers_refresh_s": 0.05, "drain_s": 0.2}
        config = GatewayConfig(**(defaults | settings))  # type: ignore[arg-type]
        gateway = Gateway(config, RedisQueue(self.url).gateway(f"g{len(self.doors) + 1}"))
        stop = asyncio.Event()
        await self.stack.enter_async_context(gateway)
        url = await self.stack.enter_async_context(serving(gateway, stop))
        client = await self.stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        self.doors.append(Door(gateway, client, stop))
        return self.doors[-1]

    async def add_worker(self, name: str = "w1", **facts: object) -> ScriptedWorker:
        worker = ScriptedWorker(RedisQueue(self.url), name, **facts)  # type: ignore[arg-type]
        await self.stack.enter_async_context(worker)
        return worker

    @asynccontextmanager
    async def echo_worker(self, name: str, slots: int = 4) -> AsyncIterator[Consumer]:
        pool = EchoPool(WorkerConfig(slots=slots))
        async with Consumer(name, pool, RedisQueue(self.url).worker(name)) as consumer:
            yield consumer


@asynccontextmanager
async def cluster_on(url: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(url, stack)
