"""A real HTTP server that plays what a test tells it: each request that runs programs gets the next act of the script.

Without a script, or after its end, every call is answered `ok` with its own code as stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, parse_qsl

import msgspec
import uvicorn

from exec_wire import Batch, Call, Cancelled, Judge, Result, VerifyBatch, encode_json
from exec_wire.problems import CONTENT_TYPE, problem

NDJSON = "application/x-ndjson"
decode_batch, decode_judge = msgspec.json.Decoder(Batch).decode, msgspec.json.Decoder(Judge).decode
decode_verify_batch = msgspec.json.Decoder(VerifyBatch).decode
LOST = {"status": "worker_lost", "blame": "infra", "retryable": True, "error": "the worker died"}


class Cut(Exception):
    """Raised by an act: the connection closes where it is."""


class Unknown(Exception):
    """Raised when a cancellation comes: the service is too old to know what is asked."""


class Exchange:
    """One request, and the means to answer it."""

    def __init__(self, scope: Any, receive: Any, send: Any, body: bytes) -> None:
        self.connection: tuple[str, int] = scope["client"]
        self.headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.query = dict(parse_qsl(scope["query_string"].decode()))
        self.indexes = [int(index) for index in parse_qs(scope["query_string"].decode()).get("index", [])]
        self.path: str = scope["path"]
        self.calls: list[Call] = decode_batch(body).calls if self.path == "/v1/batch" else []
        self.body = body
        self._receive = receive
        self._send = send

    @property
    def keys(self) -> list[str]:
        return [call.idempotency_key for call in self.calls]

    @property
    def codes(self) -> list[str]:
        return [call.code for call in self.calls]

    async def start(self, status: int = 200, content_type: str = NDJSON, **headers: str) -> None:
        named = {"content-type": content_type} | {name.replace("_", "-"): value for name, value in headers.items()}
        encoded = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def result(self, index: int, **fields: Any) -> None:
        call = self.calls[index]
        await self.write(line(Result(**{"status": "ok", "index": index, "id": call.id, "stdout": call.code} | fields)))

    async def problem(self, code: str, *, field: str = "", retry_after: str = "", retry_after_s: float | None = None) -> None:
        told = problem(code, field=field, retry_after_s=retry_after_s)
        await self.start(told.status, CONTENT_TYPE, **({"retry-after": retry_after} if retry_after else {}))
        await self.write(encode_json(told))
        await self.end()

    async def json(self, message: Any) -> None:
        await self.start(content_type="application/json")
        await self.write(encode_json(message))
        await self.end()

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


Act = Callable[[Exchange], Awaitable[None]]


def line(result: Result) -> bytes:
    return encode_json(result) + b"\n"


async def answer_all(exchange: Exchange) -> None:
    await exchange.start()
    results = (Result("ok", index=i, id=call.id, stdout=call.code) for i, call in enumerate(exchange.calls))
    await exchange.write(b"".join(map(line, results)))
    await exchange.end()


def refuse(code: str, **fields: Any) -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.problem(code, **fields)

    return act


def answer(**fields: Any) -> Act:
    """Every call of the request gets the same kind of result."""

    async def act(exchange: Exchange) -> None:
        await exchange.start()
        for index in range(len(exchange.calls)):
            await exchange.result(index, **fields)
        await exchange.end()

    return act


class Gate:
    """An act: accept, and answer when some thread opens the gate."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, exchange: Exchange) -> None:
        self._loop = asyncio.get_running_loop()
        await exchange.start()
        await self._opened.wait()
        for index in range(len(exchange.calls)):
            await exchange.result(index)
        await exchange.end()

    def open(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._opened.set)


class OpenRequests:
    def __init__(self) -> None:
        self.now = self.most = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1


class ScriptedServer:
    def __init__(self, port: int = 0) -> None:
        # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it each answer takes 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self._app, log_level="critical", interface="asgi3", lifespan="off", backlog=4096, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started = threading.Event()
        self.play()

    def play(self, *acts: Act, ever_after: Act = answer_all) -> None:
        """Forget what was, and play these."""
        self._acts = deque(acts)
        self._ever_after = ever_after
        self.requests: list[Exchange] = []
        self.cancels: list[dict[str, str]] = []  # the query of each cancellation
        self.cancelled_calls: list[tuple[str, int]] = []  # request id and index
        self.on_cancel: Callable[[], int] = lambda: 0  # gives how many were cancelled; raises `Cut` or `Unknown`
        self._open = OpenRequests()
        self.given_up = threading.Semaphore(0)  # released for each request whose client went away

    @property
    def most_open_requests(self) -> int:
        return self._open.most

    @property
    def connections(self) -> set[tuple[str, int]]:
        return {exchange.connection for exchange in self.requests}

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        async def serve() -> None:
            self._started.set()
            await self._server.serve(sockets=[self._socket])

        self._socket.listen(4096)
        asyncio.run(serve())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _body(receive)
        exchange = Exchange(scope, receive, send, body)
        if scope["path"] == "/v1/calls" and scope["method"] == "DELETE":
            return await self._cancel(exchange)
        if scope["path"] not in ("/v1/batch", "/v1/judge", "/v1/verify"):
            return await self._info(exchange)
        self.requests.append(exchange)
        with self._open.one_more():
            act = self._acts.popleft() if self._acts else self._ever_after
            await act(exchange)

    async def _info(self, exchange: Exchange) -> None:
        await exchange.start(content_type="application/json")
        await exchange.write(b'{"version": "0", "tier": "none"}')
        await exchange.end()

    async def _cancel(self, exchange: Exchange) -> None:
        self.cancels.append(exchange.query)
        self.cancelled_calls += [(exchange.query.get("request", ""), index) for index in exchange.indexes]
        try:
            count = self.on_cancel()
        except Unknown:
            return await exchange.problem("bad_query")
        await exchange.start(content_type="application/json")
        await exchange.write(encode_json(Cancelled(count)))
        await exchange.end()

    async def hold(self, exchange: Exchange) -> None:
        """An act: accept, say nothing, and note when the client gives up."""
        await exchange.start()
        await exchange.disconnected()
        self.given_up.release()


async def _body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)
