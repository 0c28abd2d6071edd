"""What several commands share: exit codes, arguments, signals, and the life of a long-running process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from exec_service.config import ConfigError, read_environment
from exec_service.telemetry.logs import say, start_logs
from exec_wire.supervisor import EXIT_TASK_FAILED, Supervisor, TaskKeepsFailing

if TYPE_CHECKING:
    from exec_service.config import GatewayConfig, JobsWorkerConfig
    from exec_wire.queue.redis import RedisQueue
    from worker.config import WorkerConfig
    from worker.pool import Pool

T = TypeVar("T")
C = TypeVar("C", bound="GatewayConfig | JobsWorkerConfig | WorkerConfig")
Commands = Any  # argparse._SubParsersAction, which has no public name

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_UNAVAILABLE, EXIT_INFRA = 69, 75  # sysexits: unavailable, try again
EXIT_LIMIT, EXIT_INTERRUPTED = 124, 130  # as timeout(1) and a shell


def fail(message: str, code: int) -> int:
    say(f"exec-service: {message}", logging.ERROR)
    return code


def port(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number from 0 to 65535 is")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=port, help="port to listen on (default 8080)")
    parser.add_argument("--keys", metavar="FILE", help="require an API key of this file (see `exec-service keys`)")


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, help="programs that run at the same time (default: three for every core)")
    add_insecure_argument(parser)


def add_insecure_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--insecure", action="store_true", help="run programs even without isolation (only code you trust)")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_argument(parser)
    parser.add_argument("--metrics-port", type=port, help="port for metrics and health (default: a free one)")


def add_stdin_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--end-with-stdin", action="store_true", help="stop when standard input ends, as a parent's pipe does")


def add_redis_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis", metavar="URL", help="redis://, rediss:// or unix:// (or EXEC_REDIS, which ps does not show)")


def read_config(config: type[C], options: argparse.Namespace, *names: str, **given: object) -> C:
    """The settings of a process, from the command line (`names` of its options) and the environment. Starts its log."""
    made = read_environment(config, os.environ, **{name: getattr(options, name) for name in names}, **given)
    start_logs(made.log_level, made.log_format)
    return made


def weakest_tier(options: argparse.Namespace) -> str:
    """The weakest tier that a single user's machine accepts; a worker of a cluster keeps its stricter default."""
    return "E" if options.insecure else os.environ.get("EXEC_MIN_TIER", "D")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ModuleNotFoundError:
        main.close()
        raise
    return uvloop.run(main)


def run_process(start: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a gateway, a worker or both until a signal arrives; turn the errors of start-up into a message and an exit code."""
    from exec_service.api.listening import BindRefused, PortTaken
    from worker.sandbox.runner_client import SandboxUnavailable

    try:
        run_loop(start())
    except (PortTaken, SandboxUnavailable) as error:
        return fail(str(error), EXIT_UNAVAILABLE)
    except BindRefused as error:
        return fail(str(error), EXIT_USAGE)
    except TaskKeepsFailing as error:
        return fail(str(error), EXIT_TASK_FAILED)
    return 0


def stop_on_signals() -> asyncio.Event:
    """The event that the first Ctrl-C or SIGTERM sets; the second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    asked = False  # by a signal: `stop` may be set for another reason, and a first signal then ends nothing at once

    def on_signal(number: int) -> None:
        nonlocal asked
        if asked:  # no cleanup needed here: the runner cleans up when this process ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked = True
        stop.set()
        say("stopping: finishing accepted calls (press again to stop at once) …")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def stop_with_stdin(stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends: the pipe of a parent, which may also be killed."""

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stop.set()

    asyncio.get_running_loop().add_reader(sys.stdin, on_input)


async def run_until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work`; cancel it and return False if `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
        return False
    await working
    return True


async def check_pool(pool: Pool) -> None:
    """Wait until every profile is warm, then run the self-test. Warns if memory may run short.

    Raises:
        SandboxUnavailable: a hostile program of the self-test was not contained.
    """
    from worker.sandbox.runner_client import SandboxUnavailable
    from worker.selftest import self_test

    if shortfall := pool.memory_shortfall:
        say(f"WARNING: {shortfall}.")
    await pool.wait_ready()
    if pool.sandbox.tier != "E" and (problems := await self_test(pool)):
        raise SandboxUnavailable("the self-test failed:\n  " + "\n  ".join(problems))


def start_cluster_process(redis: str) -> tuple[RedisQueue, str, asyncio.Event, Supervisor]:
    """The job queue, the name of this process, the event that stops it, and the supervisor of its tasks."""
    from exec_wire.queue.redis import RedisQueue

    if not redis:
        raise ConfigError("no job queue is set: give --redis redis://HOST:6379/0 or EXEC_REDIS; `exec-service up` needs none")
    try:
        queue = RedisQueue(redis)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the URL of the job queue is wrong: {error}") from None
    stop, supervisor = stop_on_signals(), Supervisor()
    supervisor.on_give_up(stop.set)
    # A new name for every start: a restarted process never takes over the name of the one before.
    return queue, f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}", stop, supervisor
