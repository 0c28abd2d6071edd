"""Everything on one machine: a gateway, the in-memory queue and one worker in this process, its runner beside it.

The story of a stop (Ctrl-C, SIGTERM): admit nothing new, finish what runs or answer it, close the doors; then the runner kills
what is left in the jails and removes what it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_service.jobs.chunks import ChunkOptions
from exec_service.jobs.scheduler import LocalChunkQueue
from exec_service.telemetry.logs import say
from exec_service.telemetry.metrics_server import MetricsApp, metrics_server
from exec_service.telemetry.worker_metrics import WorkerMetrics
from exec_wire.queue.memory import MemoryQueue
from exec_wire.supervisor import Supervisor
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.pool import Pool
from worker.sandbox import tiers
from worker.sandbox.runner_client import SandboxUnavailable
from worker.selftest import self_test
from worker.sessions import Sessions

NAME = "embedded"
GREETING = """
exec-service is ready on {url} (sandbox tier {tier}, {slots} slots). Try:

  curl -s {url}/v1/run{key} -H 'content-type: application/json' -d '{{"code": "print(6 * 7)"}}'

Playground, sessions, live view: {url}     The API: {url}/docs     gRPC: {grpc}     Stop with Ctrl-C.
"""
WEAK = """
WARNING: the sandbox is of tier {tier}: {meaning}.
  missing: {missing}
  `{command} doctor` says what would bring each; as root (sudo make run) everything is there on most machines."""
NO_SANDBOX = """
exec-service cannot run programs here: {why}

The documentation is served at {url}/docs; /readyz answers 503. Two commands that help:
  {command} doctor            what is missing, why, and what would bring it
  {command} up --insecure     run programs all the same, without isolation, for your own code only
"""


async def up(gateway_config: GatewayConfig, worker_config: WorkerConfig) -> None:
    """Serve until a signal comes. Raises `BindRefused` or `PortTaken`, with words for the user; at the end `TaskKeepsFailing`
    if that was the reason to stop."""
    queue, supervisor = MemoryQueue(), Supervisor()
    stop, url = stop_on_signals(), asyncio.get_running_loop().create_future()
    supervisor.on_give_up(stop.set)
    async with Gateway(gateway_config, queue.gateway(NAME), supervisor) as gateway, metrics_port(gateway):
        serving = asyncio.create_task(
            serve(gateway, stop=stop, listening=url.set_result, reserved=descriptors_of(worker_config))
        )
        try:
            await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await _work(worker_config, queue, gateway, url.result(), stop, serving)
        except SandboxUnavailable as error:
            gateway.not_ready_because = str(error)
            say(NO_SANDBOX.format(why=error, url=url.result(), command=own_command()), logging.ERROR)
            await asyncio.wait({serving})
        finally:
            stop.set()
            await serving
    supervisor.check()


@contextlib.asynccontextmanager
async def metrics_port(gateway: Gateway) -> AsyncIterator[None]:
    """Metrics and health at a port of their own, if one was named."""
    config = gateway.config
    if not config.metrics_port:
        yield
        return
    door = MetricsApp(gateway.metrics.text, lambda: gateway.not_ready_because)
    async with metrics_server(door, config.metrics_host, config.metrics_port, gateway.supervisor):
        yield


async def _work(
    config: WorkerConfig, queue: MemoryQueue, gateway: Gateway, url: str, stop: asyncio.Event, serving: asyncio.Task[None]
) -> None:
    """The worker's life: until the gateway has drained, so that what was accepted is finished."""
    say("warming up the interpreters …")
    supervisor = gateway.supervisor
    async with Pool(config, supervisor) as pool:
        if not await unless(stop, prove(pool)):
            return
        async with (
            Sessions(NAME, pool, supervisor) as sessions,
            Consumer(NAME, pool, queue.worker(NAME), sessions, supervisor) as consumer,
        ):
            await gateway.fleet.refresh()
            gateway.dispatch.release.look_again()
            if gateway.jobs is not None:
                gateway.keep_jobs(LocalChunkQueue(gateway.jobs.store, ChunkOptions(url)))
            gateway.metrics.registry.register(WorkerMetrics(pool, consumer))
            _greet(pool, url, gateway)
            await asyncio.wait({serving})


async def prove(pool: Pool) -> None:
    """Every profile is warm, and hostile programs were contained. Tells if memory may not be enough."""
    if words := pool.memory_shortfall:
        say(f"WARNING: {words}.")
    await pool.wait_ready()
    if pool.sandbox.tier != "E" and (problems := await self_test(pool)):
        raise SandboxUnavailable("the self-test failed:\n  " + "\n  ".join(problems))


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`, or leave it when `stop` comes first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
        return False
    await working
    return True


def descriptors_of(config: WorkerConfig) -> int:
    """How many a worker needs at most, generously: pages, outputs, control groups and sockets of each program."""
    return 16 * (config.slots + config.max_sessions)


def _greet(pool: Pool, url: str, gateway: Gateway) -> None:
    tier = pool.sandbox.tier
    if not tiers.at_least(tier, "B"):
        missing = ", ".join(f"{layer} ({why})" for layer, why in pool.missing.items())
        words = WEAK.format(tier=tier, meaning=tiers.MEANING[tier], missing=missing, command=own_command())
        say(words, logging.WARNING)
    key = ' -H "authorization: Bearer $EXEC_API_KEY"' if gateway.keys is not None else ""
    grpc = f"port {gateway.config.grpc_port}" if gateway.config.grpc_port else "off"
    say(GREETING.format(url=url, tier=tier, slots=pool.slots, key=key, grpc=grpc))


def stop_on_signals() -> asyncio.Event:
    """Set by the first Ctrl-C or SIGTERM; the second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():  # nothing to clean up here: the runner does it when it sees us gone
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()
        say("stopping: finishing what was accepted (again to stop at once) …")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def own_command() -> str:
    """How the user can start this program again."""
    command = Path(sys.argv[0])
    if command.suffix == ".py":
        return "python -m exec_service"
    return str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else str(command)
