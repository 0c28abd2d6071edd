"""A port for operators: metrics and health of a process of a cluster, separate from the callers' port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from exec_service.api.connections import Bounds, server_config
from exec_service.api.listening import CLOSE_S, PortTaken, Server, url_of
from exec_service.telemetry.metrics import CONTENT_TYPE
from exec_service.telemetry.processes import Question, Reporter
from exec_wire.supervisor import Supervisor, stop

MAX_CONNECTIONS = 64


class MetricsApp:
    """`/metrics`, `/healthz` and `/readyz`, which answers 503 with the reason while `report` gives one."""

    def __init__(self, report: Reporter) -> None:
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = await self._answer(scope["path"])
            await answer(scope, receive, send)

    async def _answer(self, path: str) -> Response:
        match path:
            case "/metrics":
                report = await self._report(Question("metrics"))
                return Response(report.metrics, headers={"content-type": CONTENT_TYPE})
            case "/healthz":
                return PlainTextResponse("ok\n")
            case "/readyz":
                reason = (await self._report(Question("readiness"))).not_ready_because
                return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)
            case _:
                return PlainTextResponse("this port serves /metrics, /healthz and /readyz\n", 404)


@contextlib.asynccontextmanager
async def metrics_server(report: Reporter, host: str, port: int, supervisor: Supervisor) -> AsyncIterator[str]:
    """Serves until the end of the block; yields the URL. Raises `PortTaken`."""
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    config = server_config(MetricsApp(report), Bounds(max_connections=MAX_CONNECTIONS), timeout_graceful_shutdown=CLOSE_S)
    started, ended, servers = asyncio.Event(), asyncio.Event(), list[Server]()

    async def serve() -> None:
        ended.clear()
        servers[:] = [Server(config, started.set)]
        try:
            await servers[0].serve(sockets=[sock.dup()])  # the server closes the sockets it gets
        finally:
            ended.set()
        if servers[0].should_exit:
            await asyncio.Event().wait()  # stopped on purpose: wait to be cancelled

    serving = supervisor.start("metrics", serve)
    try:
        await started.wait()
        yield url_of(sock)
    finally:
        servers[0].should_exit = True
        await ended.wait()
        await stop([serving])
        sock.close()
