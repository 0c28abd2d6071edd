"""`exec-service worker`: the sandboxes of a cluster; Redis joins them to the gateways.

Shutdown (SIGTERM, Ctrl-C): take no new jobs and announce no slots, finish the running ones or hand them back, deregister, stop
the runner.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from exec_service.cli import common
from exec_service.config import ConfigError
from exec_service.telemetry.logs import say

if TYPE_CHECKING:
    from exec_wire.supervisor import Supervisor
    from worker.config import WorkerConfig
    from worker.echo import EchoPool
    from worker.pool import Pool

READY = (
    "exec-service: worker {name} takes calls: {slots} slots, sandbox tier {tier} (queue: {queue}, metrics: {metrics}/metrics)"
)


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("worker", help="start a worker of a cluster; Redis joins it to the gateways")
    common.add_worker_arguments(parser)
    parser.add_argument("--min-tier", choices="ABCDE", help="refuse to run programs in a weaker sandbox (default B)")
    parser.add_argument("--runtime", choices=("sandbox", "echo"), help="echo runs nothing, for benchmarks; needs --insecure")
    common.add_cluster_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from worker.config import WorkerConfig

    def start() -> Coroutine[Any, Any, None]:
        tier, names = "E" if options.insecure else options.min_tier, ("slots", "runtime", "redis", "metrics_port")
        config = common.read_config(WorkerConfig, options, *names, min_tier=tier)
        if config.runtime == "echo" and not options.insecure:
            raise ConfigError("--runtime echo runs no programs but pretends to: it is for benchmarks, and needs --insecure")
        return work(config)

    return common.run_process(start)


async def work(config: WorkerConfig) -> None:
    """Work until a signal arrives.

    Raises:
        ConfigError, PortTaken, SandboxUnavailable: the worker cannot start so.
        TaskKeepsFailing: at the end, if a failing task was the reason to stop.
    """
    from exec_service.telemetry.metrics_server import MetricsApp, metrics_server
    from exec_service.telemetry.worker_metrics import WorkerMetrics
    from worker.consumer import Consumer
    from worker.pool import Pool
    from worker.sessions import Sessions

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    async with contextlib.AsyncExitStack() as stack:
        pool = await _open_pool(config, stack, stop, supervisor)
        if pool is None:
            return supervisor.check()
        sessions = await stack.enter_async_context(Sessions(name, pool, supervisor)) if isinstance(pool, Pool) else None
        consumer = await stack.enter_async_context(Consumer(name, pool, queue.worker(name), sessions, supervisor))

        def not_ready_because() -> str:
            unavailable = "job queue unavailable" if consumer.queue_unavailable else ""
            return supervisor.gave_up_because or consumer.cannot_take_because or unavailable

        app = MetricsApp(WorkerMetrics(pool, consumer, supervisor).text, not_ready_because)
        metrics = await stack.enter_async_context(metrics_server(app, config.metrics_host, config.metrics_port, supervisor))
        say(READY.format(name=name, slots=pool.slots, tier=pool.sandbox.tier, queue=queue.where, metrics=metrics))
        await stop.wait()
        await consumer.drain(config.drain_s)
    supervisor.check()


async def _open_pool(
    config: WorkerConfig, stack: contextlib.AsyncExitStack, stop: asyncio.Event, supervisor: Supervisor
) -> Pool | EchoPool | None:
    """A warm pool that passed the self-test; None if `stop` was set first."""
    from worker.echo import EchoPool
    from worker.pool import Pool

    if config.runtime == "echo":
        return EchoPool(config)
    pool = await stack.enter_async_context(Pool(config, supervisor))
    return pool if await common.run_until_stopped(stop, common.check_pool(pool)) else None
