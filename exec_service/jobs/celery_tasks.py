"""Chunks of bulk jobs as Celery tasks: a task is (job, chunk); all state is in the folder of jobs.

Celery only decides which jobs worker runs which chunk next. The items of a chunk go through a gateway like any other calls. A
task is acknowledged when its chunk is done or stopped early. If a task dies with its worker, the gateways hand the chunk out
again (`exec_service.jobs.scheduler`).
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from celery import Celery, signals
from celery.platforms import EX_FAILURE
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from exec_service.config import JobsWorkerConfig
from exec_service.jobs.chunks import ChunkOptions, run_chunk
from exec_service.jobs.store import JobStore
from exec_service.telemetry.logs import say
from exec_wire.queue.protocol import QueueUnavailable
from exec_wire.queue.urls import where
from exec_wire.supervisor import EXIT_TASK_FAILED

T = TypeVar("T")
QUEUE = "chunks"
TASK = "exec_service.run_chunk"
MOST_WAITING = 16  # chunks at the broker, of all jobs and all gateways
CONNECT_S, ANSWER_S = 3.0, 5.0
REDELIVER_S = 3600  # Celery's own detection of lost tasks; ours is faster, and a finished chunk is not run again
READY = "exec-service: jobs worker takes chunks: {chunks} at once (queue: {queue}, gateway: {gateway}, folder: {folder})"


def make_app(redis: str) -> Celery:
    broker = redis.replace("unix://", "redis+socket://", 1) if redis.startswith("unix://") else redis
    app = Celery("exec_service", broker=broker, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_default_queue=QUEUE,
        worker_prefetch_multiplier=1,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "global_keyprefix": "x:celery:",
            "visibility_timeout": REDELIVER_S,
            "socket_connect_timeout": CONNECT_S,
            "socket_keepalive": True,
        },
    )
    return app


class CeleryChunkQueue:
    """The gateway's side."""

    def __init__(self, redis: str) -> None:
        self._app = make_app(redis)

    async def room(self) -> int:
        return MOST_WAITING - await self._in_thread(self._length)

    def _length(self) -> int:
        with self._app.connection_or_acquire() as connection:
            length: int = connection.default_channel.client.llen(QUEUE)
            return length

    async def put(self, job: str, chunk: int) -> None:
        await self._in_thread(lambda: self._app.send_task(TASK, (job, chunk), queue=QUEUE, retry=False))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        async with asyncio.timeout(ANSWER_S):
            try:
                return await asyncio.to_thread(function)
            except (OperationalError, RedisError) as error:
                raise QueueUnavailable(f"{type(error).__name__}: {error}", sent=False) from error

    async def close(self) -> None:
        await asyncio.to_thread(self._app.close)


def work(config: JobsWorkerConfig) -> int:
    """Run chunks until a signal comes; then save partial results. Returns the exit code."""
    app, stopping = make_app(config.jobs_broker), threading.Event()
    store, options = JobStore(Path(config.jobs_dir)), ChunkOptions(config.jobs_gateway, config.jobs_at_once)

    @app.task(name=TASK)  # type: ignore[untyped-decorator]
    def chunk(job: str, number: int) -> None:
        run_chunk(store, job, number, options, stopping)

    def on_ready(**_: Any) -> None:
        queue, gateway = where(config.jobs_broker), config.jobs_gateway
        say(READY.format(chunks=config.jobs_chunks, queue=queue, gateway=gateway, folder=store.folder))

    signals.setup_logging.connect(lambda **_: None, weak=False)  # with a receiver, Celery leaves the loggers as they are
    signals.worker_ready.connect(on_ready, weak=False)
    signals.worker_shutting_down.connect(lambda **_: stopping.set(), weak=False)
    worker = app.Worker(
        pool_cls="threads",
        concurrency=config.jobs_chunks,
        queues=[QUEUE],
        quiet=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    worker.start()  # reconnects after any error of the broker; logs the error that ends it
    return EXIT_TASK_FAILED if worker.exitcode == EX_FAILURE else int(worker.exitcode or 0)
