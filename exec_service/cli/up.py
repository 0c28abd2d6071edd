"""`exec-service up`: a gateway, the in-memory queue and one worker in this process, with the runner beside it.

Shutdown (Ctrl-C, SIGTERM): admit no new calls, finish or answer the accepted ones, close the endpoints; then the runner kills
the remaining programs and removes their files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from exec_service.cli import common
from exec_service.config import GatewayConfig, read_environment
from exec_service.telemetry.logs import say

if TYPE_CHECKING:
    from exec_service.app import Gateway
    from exec_wire.queue.memory import MemoryQueue
    from worker.config import WorkerConfig
    from worker.pool import Pool

NAME = "embedded"
GREETING = """
exec-service is ready on {url} (sandbox tier {tier}, {slots} slots, gRPC: {grpc}). Try:
  curl -s {url}/v1/run{key} -H 'content-type: application/json' -d '{{"code": "print(6 * 7)"}}'
Playground, sessions, live view: {url}   API reference: {url}/docs   Stop with Ctrl-C.
"""
WEAK = """
WARNING: the sandbox is of tier {tier}: {meaning}.
  missing: {missing}
  `{command} doctor` says how to enable each; root (sudo make run) has every layer on most machines."""
NO_SANDBOX = """
exec-service cannot run programs here: {why}

It serves the documentation at {url}/docs; /readyz answers 503. Two commands that help:
  {command} doctor            which layers are missing, why, and how to enable them
  {command} up --insecure     run programs without isolation (only code you trust)
"""


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("up", help="start a gateway and a worker on this machine; needs no other service")
    common.add_gateway_arguments(parser)
    parser.add_argument("--grpc-port", type=common.port, help="port for gRPC; 0: none (default 50051, or none if taken)")
    parser.add_argument("--jobs-dir", metavar="DIR", help="folder of bulk jobs (default: no bulk jobs)")
    parser.add_argument("--metrics-port", type=common.port, help="port for metrics and health, without keys (default: none)")
    common.add_worker_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from worker.config import WorkerConfig

    def start() -> Coroutine[Any, Any, None]:
        names = ("host", "port", "grpc_port", "keys", "jobs_dir", "metrics_port")
        gateway = common.read_config(GatewayConfig, options, *names, processes=1)
        if options.grpc_port is None and "EXEC_GRPC_PORT" not in os.environ:
            gateway = without_grpc_if_taken(gateway)
        worker = read_environment(WorkerConfig, os.environ, slots=options.slots, min_tier=common.weakest_tier(options))
        return up(gateway, worker)

    return common.run_process(start)


def without_grpc_if_taken(config: GatewayConfig) -> GatewayConfig:
    """For a second service on one machine: it serves HTTP alone, and the log says how to have gRPC too."""
    from exec_service.api.listening import GrpcPortTaken, address_for_grpc

    try:
        address_for_grpc(config.host, config.grpc_port, keys=bool(config.keys))
    except GrpcPortTaken as error:
        say(f"exec-service: gRPC is off. {error}")
        return replace(config, grpc_port=0)
    return config


async def up(gateway_config: GatewayConfig, worker_config: WorkerConfig) -> None:
    """Serve until a signal arrives.

    Raises:
        BindRefused, PortTaken: the service cannot listen there.
        TaskKeepsFailing: at the end, if a failing task was the reason to stop.
    """
    from exec_service.app import Gateway, serve
    from exec_service.telemetry.metrics_server import metrics_server
    from exec_wire.queue.memory import MemoryQueue
    from exec_wire.supervisor import Supervisor
    from worker.sandbox.runner_client import SandboxUnavailable

    queue, supervisor = MemoryQueue(), Supervisor()
    stop, url = common.stop_on_signals(), asyncio.get_running_loop().create_future()
    supervisor.on_give_up(stop.set)
    reserved = 16 * (worker_config.slots + worker_config.max_sessions)  # descriptors that the worker needs at most
    async with Gateway(gateway_config, queue.gateway(NAME), supervisor) as gateway, contextlib.AsyncExitStack() as stack:
        if metrics_port := gateway_config.metrics_port:
            host = gateway_config.metrics_host
            await stack.enter_async_context(metrics_server(gateway.report, host, metrics_port, supervisor))
        serving = asyncio.create_task(serve(gateway, stop=stop, listening=url.set_result, reserved=reserved))
        try:
            await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await _work(worker_config, queue, gateway, url.result(), stop, serving)
        except SandboxUnavailable as error:
            gateway.dispatch.not_ready_because = str(error)
            say(NO_SANDBOX.format(why=error, url=url.result(), command=own_command()), logging.ERROR)
            await asyncio.wait({serving})
        finally:
            stop.set()
            await serving
    supervisor.check()


async def _work(
    config: WorkerConfig, queue: MemoryQueue, gateway: Gateway, url: str, stop: asyncio.Event, serving: asyncio.Task[None]
) -> None:
    """Run the worker until the gateway has drained, so that accepted calls are finished."""
    from exec_service.jobs.chunks import ChunkOptions
    from exec_service.jobs.scheduler import LocalChunkQueue
    from exec_service.telemetry.worker_metrics import WorkerMetrics
    from worker.consumer import Consumer
    from worker.pool import Pool
    from worker.sessions import Sessions

    say("warming up the interpreters …")
    supervisor = gateway.supervisor
    async with Pool(config, supervisor) as pool:
        if not await common.run_until_stopped(stop, common.check_pool(pool)):
            return
        async with (
            Sessions(NAME, pool, supervisor) as sessions,
            Consumer(NAME, pool, queue.worker(NAME), sessions, supervisor, near=True) as consumer,
        ):
            await gateway.worker_registry.refresh()
            gateway.dispatch.release.look_again()
            if gateway.jobs is not None:
                gateway.keep_jobs(LocalChunkQueue(gateway.jobs.store, ChunkOptions(url)))
            gateway.metrics.registry.register(WorkerMetrics(pool, consumer))
            _greet(pool, url, gateway)
            await asyncio.wait({serving})


def _greet(pool: Pool, url: str, gateway: Gateway) -> None:
    from worker.sandbox import tiers

    tier = pool.sandbox.tier
    if not tiers.at_least(tier, "B"):
        missing = ", ".join(f"{layer} ({why})" for layer, why in pool.missing.items())
        warning = WEAK.format(tier=tier, meaning=tiers.MEANING[tier], missing=missing, command=own_command())
        say(warning, logging.WARNING)
    key = ' -H "authorization: Bearer $EXEC_API_KEY"' if gateway.keys is not None else ""
    grpc = f"port {gateway.config.grpc_port}" if gateway.config.grpc_port else "off"
    say(GREETING.format(url=url, tier=tier, slots=pool.slots, key=key, grpc=grpc))


def own_command() -> str:
    """The command with which the user started this program."""
    command = Path(sys.argv[0])
    if command.suffix == ".py":
        return "python -m exec_service"
    return str(command.relative_to(Path.cwd())) if command.is_relative_to(Path.cwd()) else str(command)
