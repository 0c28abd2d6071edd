"""A port for operators: metrics and health of a process of a cluster, separate from the callers' port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from exec_service.api.connections import Bounds, server_config
from exec_service.api.listening import CLOSE_S, PortTaken, Server, url_of
from exec_service.telemetry.metrics import CONTENT_TYPE
from exec_wire.supervisor import Supervisor, stop

MAX_CONNECTIONS = 64


class MetricsApp:
    """`/metrics`, `/healthz` and `/readyz`, which answers 503 with the reason while `not_ready_because` gives one."""

    def __init__(self, metrics: Callable[[], bytes], not_ready_because: Callable[[], str]) -> None:
        self._metrics, self._not_ready_because = metrics, not_ready_because

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        match path:
            case "/metrics":
                return Response(self._metrics(), headers={"content-type": CONTENT_TYPE})
            case "/healthz":
                return PlainTextResponse("ok\n")
            case "/readyz":
                reason = self._not_ready_because()
                return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)
            case _:
                return PlainTextResponse("this port serves /metrics, /healthz and /readyz\n", 404)


@contextlib.asynccontextmanager
async def metrics_server(app: MetricsApp, host: str, port: int, supervisor: Supervisor) -> AsyncIterator[str]:
    """Serves until the end of the block; yields the URL. Raises `PortTaken`."""
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    config = server_config(app, Bounds(max_connections=MAX_CONNECTIONS), timeout_graceful_shutdown=CLOSE_S)
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
