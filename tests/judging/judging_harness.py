"""A gateway, its server, the in-memory queue and a worker with real sandboxes, all in this process; and a client of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandbox_harness import need_sandbox

from exec_client import AsyncClient, Judgement
from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_wire.queue.memory import MemoryQueue
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.pool import Pool
from worker.profiles import PROFILES
from worker.sessions import Sessions


@dataclass
class Court:
    client: AsyncClient
    pool: Pool
    gateway: Gateway
    url: str


@asynccontextmanager
async def court(*profiles: str, slots: int = 2, **settings: object) -> AsyncIterator[Court]:
    need_sandbox()
    queue, stop = MemoryQueue(), asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    chosen = {name: PROFILES[name] for name in profiles}
    async with (
        Gateway(GatewayConfig(port=0, grpc_port=0, workers_refresh_s=0.1, **settings), queue.gateway("g")) as gateway,
        Pool(WorkerConfig(slots=slots, profiles=chosen)) as pool,
    ):
        serving = asyncio.create_task(serve(gateway, stop=stop, listening=url.set_result))
        try:
            async with asyncio.timeout(60):
                await pool.wait_ready()
                await asyncio.wait({url, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # which says why it does not serve
            async with Sessions("w", pool) as sessions, Consumer("w", pool, queue.worker("w"), sessions):
                await gateway.worker_registry.refresh()
                gateway.dispatch.release.look_again()
                async with AsyncClient(await url) as client:
                    yield Court(client, pool, gateway, await url)
        finally:
            stop.set()
            await serving


def verdicts(judgement: Judgement) -> str:
    return " ".join(test.verdict for test in judgement.tests)
