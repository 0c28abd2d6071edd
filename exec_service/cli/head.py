"""`exec-service head` and `exec-service node`: what a cluster manager (Slurm, Ray) starts on the first node and on every node.

Shutdown (SIGTERM, Ctrl-C): the gateway finishes accepted calls, then the workers, then Redis ends.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from exec_service.cli import common

HEAD = (
    "Redis, a gateway and a new key for one user, under a cluster manager: see docs/slurm.md. COMMAND starts the workers: it "
    "gets EXEC_REDIS, and a standard input that ends when the service stops. The service ends with COMMAND."
)


def add(commands: common.Commands) -> None:
    head = commands.add_parser("head", help="start Redis and a gateway as one user's own, under Slurm or Ray", description=HEAD)
    head.add_argument("--file", type=Path, required=True, help="gets EXEC_URL and EXEC_API_KEY, readable by this user only")
    head.add_argument("--address", metavar="IP", help="this node's address for the others (default: that of its name)")
    head.add_argument("command", nargs="*", metavar="-- COMMAND", help="what starts the workers, such as srun …")
    node = commands.add_parser("node", help="start a worker, and start it again when it ends by a failure")
    node.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="arguments of `exec-service worker`")
    for parser, run in ((head, run_head), (node, run_node)):
        common.add_stdin_argument(parser)
        parser.set_defaults(run=run)


def run_head(options: argparse.Namespace) -> int:
    from exec_service import cluster_parts

    address = options.address or socket.gethostbyname(socket.gethostname())
    return _run(options, lambda stop: cluster_parts.run_head(address, options.file, options.command, stop))


def run_node(options: argparse.Namespace) -> int:
    from exec_service import cluster_parts

    return _run(options, lambda stop: cluster_parts.run_node(options.arguments, stop))


def _run(options: argparse.Namespace, work: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    from exec_service.cluster_parts import PartFailed

    async def until_stopped() -> int:
        stop = common.stop_on_signals()
        if options.end_with_stdin:
            common.stop_with_stdin(stop)
        return await work(stop)

    try:
        return common.run_loop(until_stopped())
    except PartFailed as error:
        return common.fail(str(error), error.code)
