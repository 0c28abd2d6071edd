"""Sessions through Redis: any gateway reaches them, none is missed, and they end with their worker."""

import asyncio
import time

import pytest
from common import until
from sandbox_harness import need_sandbox

from exec_service.app import Gateway
from exec_service.config import GatewayConfig
from exec_service.dispatch.requests import ANONYMOUS
from exec_wire import Limits, Tags
from exec_wire.messages.calls import Selection
from exec_wire.messages.sessions import Cell, Fork, SessionSpec, Tenant
from exec_wire.queue.redis import RedisQueue
from loadtest.support.redis_server import RedisServer
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.pool import Pool
from worker.sessions import Sessions

pytestmark = pytest.mark.one_server  # the rules of directed jobs are tested in test_queue.py, on all

SLOW = Cell("import time; time.sleep(0.5)\nx += 1\nx", idempotency_key="k")


async def seen(gateway: Gateway, workers: int) -> None:
    async with asyncio.timeout(30):
        while len(gateway.worker_registry.workers) != workers:
            await asyncio.sleep(0.05)
            await gateway.worker_registry.refresh()


async def test_any_gateway_reaches_a_session_and_it_ends_with_its_worker(own_server: RedisServer) -> None:
    need_sandbox()
    queue, config = RedisQueue(own_server.url), GatewayConfig(redis=own_server.url)
    async with Pool(WorkerConfig(slots=1, profiles={"bare": []})) as pool:
        await pool.wait_ready()
        async with Gateway(config, queue.gateway("two")) as second:
            async with Sessions("w", pool) as sessions, Consumer("w", pool, queue.worker("w"), sessions):
                await seen(second, 1)
                async with Gateway(config, queue.gateway("one")) as first:
                    await seen(first, 1)
                    spec = SessionSpec(limits=Limits(memory_mb=256), tags=Tags(run="r"))
                    id = (await first.sessions.create(spec)).id
                    assert (await first.sessions.run(id, Cell("x = 1\nx"))).value == "1"
                    left = asyncio.create_task(first.sessions.run(id, SLOW))
                    await asyncio.sleep(0.2)
                    left.cancel()
                assert (await second.sessions.run(id, SLOW)).value == "2"
                fork = (await second.sessions.fork(id, Fork(1), ANONYMOUS)).sessions[0]
                await second.sessions.run(fork.id, Cell("x = 5"))
                assert [(await second.sessions.run(each, Cell("x"))).value for each in (id, fork.id)] == ["2", "5"]
                listed = (await second.sessions.list(Selection(run="r"), ANONYMOUS)).sessions
                assert {session.id for session in listed} == {id, fork.id}
                await second.sessions.end(fork.id, Tenant(), ANONYMOUS)
                running = asyncio.create_task(second.sessions.run(id, Cell("import time; time.sleep(60)", wall_s=60)))
                await until(lambda: not pool.free_slots, "the cell runs")
                gone_at = time.monotonic()
            await seen(second, 0)
            result = await running
            assert (result.status, result.blame, result.retryable) == ("session_lost", "infra", False)
            assert time.monotonic() - gone_at < 30
