"""`exec-service gateway`: a gateway of a cluster; Redis joins it to the workers.

Shutdown (SIGTERM, Ctrl-C): admit no new calls, finish or answer the accepted ones, close the endpoints, deregister.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from exec_service.cli import common
from exec_service.config import GatewayConfig
from exec_service.refusals import Refusal
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = ("host", "port", "grpc_port", "keys", "redis", "metrics_port", "jobs_dir")
    return common.run_process(lambda: serve_gateway(common.read_config(GatewayConfig, options, *names)))


async def serve_gateway(config: GatewayConfig) -> None:
    """Serve until a signal arrives.

    Raises:
        ConfigError, BindRefused, PortTaken: the service cannot start so.
        TaskKeepsFailing: at the end, if a failing task was the reason to stop.
    """
    from exec_service.app import Gateway, serve
    from exec_service.telemetry.metrics_server import MetricsApp, metrics_server

    queue, name, stop, supervisor = common.start_cluster_process(config.redis)
    gateway = Gateway(config, queue.gateway(name), supervisor)
    app = MetricsApp(gateway.metrics.text, lambda: not_ready_because(gateway))
    async with gateway, metrics_server(app, config.metrics_host, config.metrics_port, supervisor) as metrics:
        if gateway.jobs is not None:
            from exec_service.jobs.celery_tasks import CeleryChunkQueue  # Celery is slow to load and not always needed

            gateway.keep_jobs(CeleryChunkQueue(config.jobs_broker))
        ready = READY.format(name=name, url="{}", queue=queue.where, metrics=metrics)
        await serve(gateway, stop=stop, listening=lambda url: say(ready.format(url)))
    supervisor.check()


def not_ready_because(gateway: Gateway) -> str:
    try:
        gateway.dispatch.check_ready()
    except Refusal as refusal:
        return str(refusal)
    return ""
