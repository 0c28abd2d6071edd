"""Gateways and workers in processes of their own, joined by Redis: any number of each, on any machines.

The story of a stop (SIGTERM, Ctrl-C). A gateway admits nothing new, finishes what it accepted or answers it, closes the doors
and leaves. A worker takes nothing more and is not counted any more, finishes what runs or hands it back, leaves, and ends its
runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket

from exec_service.app import Gateway, serve
from exec_service.cli.up import prove, stop_on_signals, unless
from exec_service.config import ConfigError, GatewayConfig
from exec_service.refusals import Refusal
from exec_service.telemetry.logs import say
from exec_service.telemetry.metrics_server import SideDoor, side_door
from exec_service.telemetry.worker_metrics import WorkerMetrics
from exec_wire.queue.connection import where
from exec_wire.queue.redis import RedisQueue
from exec_wire.supervisor import Supervisor
from worker.config import WorkerConfig
from worker.consumer import Consumer
from worker.echo import EchoPool
from worker.pool import Pool
from worker.sessions import Sessions

GATEWAY = "exec-service: gateway {name} is ready on {url} (queue: {queue}, metrics: {side}/metrics)"
WORKER = "exec-service: worker {name} takes calls: {slots} slots, sandbox tier {tier} (queue: {queue}, metrics: {side}/metrics)"


async def run_gateway(config: GatewayConfig) -> None:
    """Serve until a signal comes. Raises `ConfigError`, `BindRefused` or `PortTaken`, with words for the user; at the end
    `TaskKeepsFailing` if that was the reason to stop."""
    queue, name, stop, supervisor = open_queue(config.redis), own_name(), stop_on_signals(), Supervisor()
    supervisor.on_give_up(stop.set)
    gateway = Gateway(config, queue.gateway(name), supervisor)
    door = SideDoor(gateway.metrics.text, lambda: not_ready_because(gateway))
    async with gateway, side_door(door, config.metrics_host, config.metrics_port, supervisor) as side:
        if gateway.jobs is not None:
            from exec_service.jobs.celery_tasks import CeleryLine  # Celery takes a while to load, and is not always wanted

            gateway.keep_jobs(CeleryLine(config.redis))
        words = GATEWAY.format(name=name, url="{}", queue=where(config.redis), side=side)
        await serve(gateway, stop=stop, listening=lambda url: say(words.format(url)))
    supervisor.check()


def not_ready_because(gateway: Gateway) -> str:
    try:
        gateway.dispatch.check_ready()
    except Refusal as refusal:
        return str(refusal)
    return ""


async def run_worker(config: WorkerConfig) -> None:
    """Work until a signal comes. Raises `ConfigError`, `PortTaken` or `SandboxUnavailable`, with words for the user; at the
    end `TaskKeepsFailing` if that was the reason to stop."""
    queue, name, stop, supervisor = open_queue(config.redis), own_name(), stop_on_signals(), Supervisor()
    supervisor.on_give_up(stop.set)
    async with contextlib.AsyncExitStack() as stack:
        pool = await _pool(config, stack, stop, supervisor)
        if pool is None:
            return supervisor.check()
        sessions = await stack.enter_async_context(Sessions(name, pool, supervisor)) if isinstance(pool, Pool) else None
        consumer = await stack.enter_async_context(Consumer(name, pool, queue.worker(name), sessions, supervisor))
        metrics = WorkerMetrics(pool, consumer, supervisor)
        door = SideDoor(metrics.text, lambda: supervisor.gave_up_because or _cannot_work_because(consumer))
        side = await stack.enter_async_context(side_door(door, config.metrics_host, config.metrics_port, supervisor))
        say(WORKER.format(name=name, slots=pool.slots, tier=pool.sandbox.tier, queue=where(config.redis), side=side))
        await stop.wait()
        await consumer.drain(config.drain_s)
    supervisor.check()


async def _pool(
    config: WorkerConfig, stack: contextlib.AsyncExitStack, stop: asyncio.Event, supervisor: Supervisor
) -> Pool | EchoPool | None:
    """Warm and proven; None if `stop` came first."""
    if config.runtime == "echo":
        return EchoPool(config)
    pool = await stack.enter_async_context(Pool(config, supervisor))
    return pool if await unless(stop, prove(pool)) else None


def _cannot_work_because(consumer: Consumer) -> str:
    return consumer.cannot_take_because or ("the queue is away" if consumer.queue_unavailable else "")


def open_queue(url: str) -> RedisQueue:
    if not url:
        raise ConfigError("which queue? Give --redis redis://HOST:6379/0 or EXEC_REDIS; `exec-service up` needs none")
    try:
        return RedisQueue(url)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the URL of the queue: {error}") from None


def own_name() -> str:
    """Anew with every start: nobody is taken for what was there before."""
    return f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
