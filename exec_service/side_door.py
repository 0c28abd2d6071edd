"""A port for operators: metrics and health of a process of a cluster, away from the port that callers use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from exec_service.app import CLOSE_S, PortTaken, Server, url_of
from exec_service.metrics import CONTENT_TYPE


class SideDoor:
    """`/metrics`, `/healthz` and `/readyz`; the latter is 503 with the words of `not_ready_because` while there are any."""

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
                why = self._not_ready_because()
                return PlainTextResponse(f"{why or 'ready'}\n", 503 if why else 200)
            case _:
                return PlainTextResponse("here are /metrics, /healthz and /readyz\n", 404)


@contextlib.asynccontextmanager
async def side_door(app: SideDoor, host: str, port: int) -> AsyncIterator[str]:
    """Open until the end of the block; gives its URL. Raises `PortTaken`."""
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    started = asyncio.Event()
    server = Server(config, started.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await started.wait()
        yield url_of(sock)
    finally:
        server.should_exit = True
        await serving
        sock.close()
