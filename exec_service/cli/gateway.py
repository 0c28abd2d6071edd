"""`exec-service gateway`: a gateway of a cluster; Redis joins it to the workers.

Shutdown (SIGTERM, Ctrl-C): admit no new calls, finish or answer the accepted ones, close the endpoints, deregister. With
`--processes` every process does so; SIGHUP replaces them one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exec_service.cli import common
from exec_service.config import GatewayConfig
from exec_service.telemetry.logs import say

if TYPE_CHECKING:
    from exec_service.app import Gateway

READY = "exec-service: gateway {name} is ready on {url} (queue: {queue}, metrics: {metrics}/metrics)"


def add(commands: common.Commands) -> None:
    parser = commands.add_parser("gateway", help="start a gateway of a cluster; Redis joins it to the workers")
    common.add_gateway_arguments(parser)
    parser.add_argument("--grpc-port", type=common.port, help="port for gRPC; 0: none (default 50051)")
    parser.add_argument(
        "--jobs-dir", metavar="DIR", help="folder of bulk jobs, shared with the jobs workers (default: no bulk jobs)"
    )
    common.add_cluster_arguments(parser)
    common.add_processes_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    def start() -> Coroutine[Any, Any, None]:
        names = ("host", "port", "grpc_port", "keys", "redis", "metrics_port", "jobs_dir", "processes")
        config = common.read_config(GatewayConfig, options, *names)
        if options.part_of is not None:
            return serve_part(config, options.part_of, socket.socket(fileno=options.listen_fd))
        return serve_gateway(config) if config.processes == 1 else start_processes(config)

    return common.run_process(start)


async def serve_gateway(config: GatewayConfig) -> None:
    """Serve until a signal arrives.

    Raises:
        ConfigError, BindRefused, PortTaken: the service cannot start so.
        TaskKeepsFailing: at the end, if a failing task was the reason to stop.
    """
    from exec_service.app import Gateway, serve
    from exec_service.telemetry.metrics_server import metrics_server

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    gateway = Gateway(config, queue.gateway(name), supervisor)
    metrics_port = metrics_server(gateway.report, config.metrics_host, config.metrics_port, supervisor)
    async with gateway, metrics_port as metrics:
        keep_jobs(gateway)
        await serve(gateway, stop=stop, listening=lambda url: say(ready(queue.where, name, url, metrics)))
    supervisor.check()


async def start_processes(config: GatewayConfig) -> None:
    """Keep the processes of a gateway running until a signal arrives. Raises as `serve_gateway` does, and `DidNotStart`."""
    from exec_service.api.listening import address_for_grpc, bind, url_of
    from exec_service.cli.processes import Processes
    from exec_service.telemetry.metrics_server import metrics_server

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    if config.grpc_port:
        address_for_grpc(config.host, config.grpc_port, keys=bool(config.keys))  # each process binds it for itself
    with bind(config.host, config.port, keys=bool(config.keys)) as sock:
        processes = Processes(config.processes, supervisor, sock.fileno())
        metrics_port = metrics_server(processes.report, config.metrics_host, config.metrics_port, supervisor)
        async with processes, metrics_port as metrics:
            say(ready(queue.where, name, url_of(sock), metrics))
            await stop.wait()
            await processes.drain()
    supervisor.check()


async def serve_part(config: GatewayConfig, folder: Path, sock: socket.socket) -> None:
    """Be one process of a gateway until a signal arrives."""
    from exec_service.app import Gateway, serve
    from exec_service.cli.processes import child_of

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    replaced = asyncio.Event()

    def leave() -> None:
        replaced.set()
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, leave)
    gateway = Gateway(config, queue.gateway(name), supervisor, family=folder)
    async with child_of(folder, gateway.report) as tell_ready, gateway:
        keep_jobs(gateway)
        await serve(gateway, stop=stop, listening=lambda _: tell_ready(), sock=sock, replaced=replaced.is_set)
    supervisor.check()


def keep_jobs(gateway: Gateway) -> None:
    if gateway.jobs is not None:
        from exec_service.jobs.celery_tasks import CeleryChunkQueue  # Celery is slow to load and not always needed

        gateway.keep_jobs(CeleryChunkQueue(gateway.config.jobs_broker))


def ready(queue: str, name: str, url: str, metrics: str) -> str:
    return READY.format(name=name, url=url, queue=queue, metrics=metrics)
