"""`exec-service worker`: the sandboxes of a cluster; Redis joins them to the gateways.

Shutdown (SIGTERM, Ctrl-C): take no new jobs and announce no slots, finish the running ones or hand them back, deregister, stop
the runner. With `--processes` every process does so; SIGHUP replaces them one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exec_service.cli import common
from exec_service.config import ConfigError
from exec_service.telemetry.logs import say

if TYPE_CHECKING:
    from exec_wire.supervisor import Supervisor
    from worker.config import WorkerConfig
    from worker.echo import EchoPool
    from worker.pool import Pool

READY = "exec-service: worker {name} takes calls: {slots} slots, {what} (queue: {queue}, metrics: {metrics}/metrics)"


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("worker", help="start a worker of a cluster; Redis joins it to the gateways")
    common.add_worker_arguments(parser)
    parser.add_argument("--min-tier", choices="ABCDE", help="refuse to run programs in a weaker sandbox (default B)")
    parser.add_argument("--runtime", choices=("sandbox", "echo"), help="echo runs nothing, for benchmarks; needs --insecure")
    common.add_cluster_arguments(parser)
    common.add_stdin_argument(parser)
    common.add_processes_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from worker.config import WorkerConfig

    def start() -> Coroutine[Any, Any, None]:
        tier, names = "E" if options.insecure else options.min_tier, ("slots", "processes", "runtime", "redis", "metrics_port")
        config = common.read_config(WorkerConfig, options, *names, min_tier=tier)
        if config.runtime == "echo" and not options.insecure:
            raise ConfigError("--runtime echo runs no programs but pretends to: it is for benchmarks, and needs --insecure")
        if options.part_of is not None:
            return work(config.part(options.part), options.part_of)
        if config.processes > 1:
            return start_processes(config, options.end_with_stdin)
        return work(config, end_with_stdin=options.end_with_stdin)

    return common.run_process(start)


async def start_processes(config: WorkerConfig, end_with_stdin: bool) -> None:
    """Keep the processes of a worker running until a signal arrives. Raises as `work` does, and `DidNotStart`."""
    from exec_service.cli.processes import Processes
    from exec_service.telemetry.metrics_server import metrics_server

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    if end_with_stdin:
        common.stop_with_stdin(stop)
    processes = Processes(config.processes, supervisor)
    metrics_port = metrics_server(processes.report, config.metrics_host, config.metrics_port, supervisor)
    async with processes, metrics_port as metrics:
        what = f"{config.processes} processes"
        say(READY.format(name=name, slots=config.slots, what=what, queue=queue.where, metrics=metrics))
        await stop.wait()
        await processes.drain()
    supervisor.check()


async def work(config: WorkerConfig, family: Path | None = None, *, end_with_stdin: bool = False) -> None:
    """Work until a signal arrives, or until standard input ends. `family`: the folder of the sockets of all processes of the
    worker, if there are several.

    Raises:
        ConfigError, PortTaken, SandboxUnavailable: the worker cannot start so.
        TaskKeepsFailing: at the end, if a failing task was the reason to stop.
    """
    from exec_service.cli.processes import child_of
    from exec_service.telemetry.metrics_server import metrics_server
    from exec_service.telemetry.processes import Question, Report
    from exec_service.telemetry.worker_metrics import WorkerMetrics
    from worker.consumer import Consumer
    from worker.pool import Pool
    from worker.sessions import Sessions

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    if end_with_stdin:
        common.stop_with_stdin(stop)
    async with contextlib.AsyncExitStack() as stack:
        pool = await _open_pool(config, stack, stop, supervisor)
        if pool is None:
            return supervisor.check()
        sessions = await stack.enter_async_context(Sessions(name, pool, supervisor)) if isinstance(pool, Pool) else None
        consumer = await stack.enter_async_context(Consumer(name, pool, queue.worker(name), sessions, supervisor))

        figures = WorkerMetrics(pool, consumer, supervisor)

        async def report(question: Question) -> Report:
            unavailable = "job queue unavailable" if consumer.queue_unavailable else ""
            page = figures.text() if question.about == "metrics" else ""
            return Report(page, supervisor.gave_up_because or consumer.cannot_take_because or unavailable)

        if family is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.set)  # another process has taken its place
            (await stack.enter_async_context(child_of(family, report)))()
        else:
            server = metrics_server(report, config.metrics_host, config.metrics_port, supervisor)
            metrics, what = await stack.enter_async_context(server), f"sandbox tier {pool.sandbox.tier}"
            say(READY.format(name=name, slots=pool.slots, what=what, queue=queue.where, metrics=metrics))
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
