"""Puts the gateway together: its routes, its tasks, and its server.

    async with Gateway(config, queue) as gateway:
        await serve(gateway, stop=stop, listening=print)

Shutdown: refuse new calls with 503; finish accepted calls, or answer them when the time is over; close the listening socket and
the connections; stop the tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse
from starlette.routing import Route

from exec_service.api.calls import hot_routes, plain_routes
from exec_service.api.connections import Bounds, room_for_connections, server_config
from exec_service.api.docs_page import CONTENT_SECURITY_POLICY, docs_page
from exec_service.api.errors import error_answerer
from exec_service.api.jobs import BulkJobs, job_routes
from exec_service.api.judge import judging_routes
from exec_service.api.listening import CLOSE_S, Server, address_for_grpc, bind, url_of
from exec_service.api.middleware import Guard
from exec_service.api.openapi import openapi_of
from exec_service.api.sessions import session_routes
from exec_service.api.stats import report_of, stats_routes
from exec_service.api.validation import Validator
from exec_service.api.web_page import page_routes
from exec_service.compat import adapter_routes, keyless_paths
from exec_service.compat.adapter import GatewayParts
from exec_service.config import GatewayConfig, package_version
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.jobs.scheduler import ChunkQueue, JobScheduler
from exec_service.jobs.store import JobStore
from exec_service.refusals import Refusal
from exec_service.sessions import SessionRouter
from exec_service.telemetry.metrics import GatewayCollector, Metrics
from exec_service.telemetry.processes import ANSWER_S, PARENT, Question, Report, ask
from exec_service.telemetry.tracing import Traces
from exec_service.tenants.keys import Keys
from exec_wire.queue.protocol import GatewayQueue, QueueUnavailable
from exec_wire.supervisor import Supervisor, stop

if TYPE_CHECKING:
    from exec_service.rpc.server import GrpcServer


class Gateway:
    """One gateway, or one of its processes: an async context manager that starts and stops its tasks.

    `family`: the folder of sockets of all processes of the gateway, if there are several.
    """

    def __init__(
        self, config: GatewayConfig, queue: GatewayQueue, supervisor: Supervisor | None = None, family: Path | None = None
    ) -> None:
        self.config, self.family = config, family
        self.supervisor = supervisor or Supervisor()
        self.supervisor.on_give_up(self._give_up)
        self.metrics = Metrics()
        self._queue = queue
        if config.otlp_endpoint:
            self.metrics.traces = Traces(config.otlp_endpoint, config.trace_ratio)
        self.keys = Keys(Path(config.keys), config.retry_after_max_s) if config.keys else None
        self.worker_registry = WorkerRegistry(queue, config.workers_refresh_s, config.release_factor, self.keys)
        weight_of = self.keys.weight if self.keys is not None else None
        self.dispatch = Dispatch(
            config, queue, self.worker_registry, self.metrics, weight_of=weight_of, supervisor=self.supervisor
        )
        self.metrics.registry.register(GatewayCollector(self.dispatch, self.worker_registry, self.supervisor, queue))
        self.sessions = SessionRouter(config, queue, self.worker_registry, self.dispatch, self.metrics)
        self.adapter_tasks: set[asyncio.Task[None]] = set()
        self.jobs = BulkJobs(JobStore(Path(config.jobs_dir))) if config.jobs_dir else None
        self.cluster = queue.shared
        self.app = build_app(self)
        self._tasks: list[asyncio.Task[None]] = []

    def _give_up(self) -> None:
        self.dispatch.draining, self.dispatch.draining_because = True, self.supervisor.gave_up_because

    async def __aenter__(self) -> Gateway:
        try:
            await self.worker_registry.refresh()
        except QueueUnavailable as unavailable:
            self.dispatch.release.queue_is(str(unavailable))
        dispatch = self.dispatch
        refresh = partial(self.worker_registry.refresh_forever, lambda: dispatch.waiting.count > 0, dispatch.release.look_again)
        self._tasks.append(self.supervisor.start("worker_registry", refresh))
        if self.keys is not None:
            self._tasks.append(self.supervisor.start("keys", self.keys.reread_forever))
        self.dispatch.start()
        return self

    async def report(self, question: Question) -> Report:
        """The figures of this process."""
        return report_of(self.dispatch, self.worker_registry, self.metrics, question)

    async def report_of_all(self, question: Question) -> Report:
        """The figures of all processes; of this one if their parent does not answer."""
        found = await ask(self.family / PARENT, question, 2 * ANSWER_S) if self.family is not None else None
        return found or await self.report(question)

    def keep_jobs(self, line: ChunkQueue) -> None:
        """Hand the chunks of bulk jobs to the jobs workers behind `line`. Needs a folder of bulk jobs."""
        assert self.jobs is not None
        self.jobs.scheduler = JobScheduler(self.jobs.store, line, self.config.jobs_keep_s)
        self._tasks.append(self.supervisor.start("jobs", self.jobs.scheduler.run_forever))

    async def __aexit__(self, *_: object) -> None:
        await self.dispatch.stop()
        await stop(self._tasks)
        if self.jobs is not None and self.jobs.scheduler is not None:
            await self.jobs.scheduler.close()
        await stop(self.adapter_tasks)
        await self._queue.leave()
        if self.metrics.traces is not None:
            await self.metrics.traces.close()

    async def drain(self, timeout_s: float | None = None) -> None:
        """Stop admitting and finish accepted calls; after `timeout_s` the rest is answered `internal_error`."""
        await self.dispatch.drain(self.config.drain_s if timeout_s is None else timeout_s)


def build_app(gateway: Gateway) -> FastAPI:
    """The table of contents of HTTP: every route, and what each request passes first."""
    config, dispatch, metrics, jobs = gateway.config, gateway.dispatch, gateway.metrics, gateway.jobs
    worker_registry = gateway.worker_registry
    app = FastAPI(
        title="exec-service",
        version=package_version(),
        description="Runs programs in sandboxes and says whether the program or the machine is to blame for a failure.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    validator = Validator(worker_registry, config)
    app.router.routes.extend(hot_routes(config, dispatch, validator) + judging_routes(config, dispatch, validator))
    app.router.routes.extend(session_routes(config, dispatch, validator, gateway.sessions))
    shared = (gateway.sessions, gateway.adapter_tasks, gateway.supervisor)
    adapters = adapter_routes(GatewayParts(config, dispatch, validator, worker_registry, metrics, *shared))
    app.router.routes.extend(route for routes in adapters.values() for route in routes)
    app.include_router(plain_routes(config, dispatch, worker_registry, cluster=gateway.cluster))
    app.include_router(job_routes(config, dispatch, validator, jobs))
    app.include_router(stats_routes(worker_registry, metrics, gateway.report_of_all, cluster=gateway.cluster))
    app.router.routes.extend(page_routes())
    _add_docs(app, [route for routes in adapters.values() for route in routes])
    for kind in (Refusal, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, error_answerer(metrics))
    keyless = keyless_paths(config, adapters)
    app.add_middleware(Guard, metrics=metrics, keys=gateway.keys, keyless=keyless, jobs=jobs.store if jobs else None)
    return app


def _add_docs(app: FastAPI, adapters: list[Route]) -> None:
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(openapi_of(app, adapters))
        return document

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(openapi()), headers={"content-security-policy": CONTENT_SECURITY_POLICY})

    app.openapi = openapi  # type: ignore[method-assign]


async def serve(
    gateway: Gateway,
    *,
    stop: asyncio.Event,
    listening: Callable[[str], None] | None = None,
    reserved: int = 0,
    sock: socket.socket | None = None,
    replaced: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until `stop` is set, then drain and close.

    Args:
        listening: called with the URL once connections are accepted.
        reserved: descriptors to leave to the rest of the process.
        sock: accept here, with other processes; else at the address of the settings.
        replaced: whether another process has taken the place of this one when `stop` is set; then nothing is refused meanwhile.

    Raises:
        BindRefused, PortTaken: the gateway cannot listen there.
    """
    config = gateway.config
    sock = sock or bind(config.host, config.port, keys=gateway.keys is not None)
    connections = room_for_connections(reserved, config.max_connections)
    of_grpc = max(1, connections // 4) if config.grpc_port else 0  # each carries many requests
    try:
        async with serving_grpc(gateway, of_grpc) as grpc:
            url = url_of(sock)
            server = Server(
                _server_config(gateway, max(1, connections - of_grpc)), lambda: listening(url) if listening else None
            )
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    if replaced():
                        await asyncio.gather(server.hand_over(), grpc.hand_over(config.drain_s) if grpc else asyncio.sleep(0))
                    if grpc:
                        grpc.finish_streams()
                    await gateway.drain()
            finally:
                stopping.cancel()
                server.should_exit = True
                await serving
    finally:
        sock.close()


@contextlib.asynccontextmanager
async def serving_grpc(gateway: Gateway, max_connections: int) -> AsyncIterator[GrpcServer | None]:
    """Serve gRPC if it is enabled."""
    config = gateway.config
    if not config.grpc_port:
        yield None
        return
    from exec_service.rpc.server import GrpcServer  # grpc is slow to load and not always enabled

    shared = gateway.family is not None
    address = address_for_grpc(config.host, config.grpc_port, keys=gateway.keys is not None, shared=shared)
    server = GrpcServer(gateway)
    await server.start(address, max_connections, shared=shared)
    try:
        yield server
    finally:
        await server.stop(CLOSE_S)


def _server_config(gateway: Gateway, max_connections: int) -> uvicorn.Config:
    config = gateway.config
    limits = {name: getattr(config, name) for name in ("max_header_bytes", "header_s", "body_s", "write_stall_s")}
    bounds = Bounds(max_connections, refused=gateway.metrics.rejected, **limits)
    times = {"timeout_keep_alive": config.keep_alive_s, "timeout_graceful_shutdown": CLOSE_S}
    return server_config(gateway.app, bounds, backlog=config.backlog, **times)
