"""The HTTP endpoints: decode, dispatch, encode.

The two hot routes are plain ASGI endpoints: FastAPI's own request handling costs several times what the rest of the
gateway does per request. The others are ordinary FastAPI routes.
"""

import asyncio
from functools import partial
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from exec_service.api.encoding import LARGE_CHARS, WRITE_BYTES, encode, encode_list, portions
from exec_service.api.info import check_ready, info_of
from exec_service.api.middleware import RequestFacts
from exec_service.api.responses import answers, query_parameters
from exec_service.api.streaming import ClientGone, on_disconnect, or_keep_alive
from exec_service.api.tools import TOOLS, Tools
from exec_service.api.validation import SMALL_BYTES, Validator, check_strings, read_selection
from exec_service.config import GatewayConfig
from exec_service.dispatch.admission import Admission, ArrivingBody
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import CallRequest
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.refusals import NotPermitted, Overloaded, Refusal
from exec_service.telemetry import metrics as metrics_text
from exec_service.telemetry.metrics import Metrics
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Cancelled, Result, Selection, encode_json
from exec_wire.messages.info import Info

NDJSON = "application/x-ndjson"

_encode_lines = msgspec.json.Encoder().encode_lines
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Results(msgspec.Struct, frozen=True):
    """The answer of `POST /v1/batch?stream=false`, in the order of the calls."""

    results: list[Result]


class Health(msgspec.Struct, frozen=True):
    status: str


class Ready(msgspec.Struct, frozen=True):
    status: str
    tier: str  # what every call gets at least


class Endpoint:
    """What the routes that run programs have in common."""

    def __init__(self, config: GatewayConfig, dispatch: Dispatch, validator: Validator) -> None:
        self._config, self._dispatch, self._validator = config, dispatch, validator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, scope["exec"], receive, send)

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _read(self, scope: Scope, facts: RequestFacts, receive: Receive) -> bytes:
        body = await read_body(scope, receive, self._config.max_body_bytes, self._dispatch.admission)
        facts.body_bytes = len(body)
        if self._dispatch.draining or self._dispatch.not_ready_because:
            self._dispatch.check_open()  # before what a call asks for is compared with what is there
        if len(body) > SMALL_BYTES:
            check_strings(body, self._config.max_strings_per_request)
        return body

    async def _send_json(self, body: bytes, send: Send) -> None:
        """In pieces, so that a large answer that nobody reads stays charged and is given up, as a stream is."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            for at in range(0, len(body), WRITE_BYTES):
                part, more = body[at : at + WRITE_BYTES], at + WRITE_BYTES < len(body)
                async with asyncio.timeout(self._config.write_stall_s):
                    await send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError:
            raise ClientGone from None  # the server closes a connection whose answer was left unfinished

    async def _start_stream(self, send: Send) -> None:
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, chunk: bytes, send: Send) -> None:
        try:
            async with asyncio.timeout(self._config.write_stall_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None


class RunEndpoint(Endpoint):
    """`POST /v1/run`: a Call in, its Result out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts: RequestFacts = scope["exec"]
        call = self._validator.read_call(await self._read(scope, facts, receive), facts.origin.warnings)
        async with self._dispatch.run([call], facts.origin) as request:
            facts.calls = 1
            with on_disconnect(request.close, scope):
                results = await request.take_all()
            if not results:
                raise ClientGone
            is_small = request.arrived_bytes <= LARGE_CHARS
            await self._send_json(encode_json(results[0]) if is_small else await encode(results[0]), send)


class BatchEndpoint(Endpoint):
    """`POST /v1/batch`: calls in, results out, each as it lands or all in order."""

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        body = await self._read(scope, facts, receive)
        stream = flag(scope, "stream", default=True)
        calls = self._validator.read_batch(body, facts.origin.warnings)
        async with self._dispatch.run(calls, facts.origin, "$.calls[{}]") as request:
            facts.calls = len(calls)
            with on_disconnect(request.close, scope):
                if stream:
                    await self._send_stream(request, send)
                    return
                results = await request.take_all(self._check_room)
            if request.closed:
                raise ClientGone
            await self._send_json(b'{"results":' + await encode_list(results) + b"}", send)

    def _check_room(self) -> None:
        """Results that wait for each other are not read, so no other program is started while they take all the room."""
        if self._dispatch.admission.is_full:
            words = "the results take more memory than there is before all of them are there; ask for them as a stream"
            raise Overloaded(words, self._config.retry_after_max_s)

    async def _send_stream(self, request: CallRequest, send: Send) -> None:
        await self._start_stream(send)
        while arrived := await or_keep_alive(request.take, partial(self._write, b"\n", send)):
            for portion in portions(arrived):
                lines = _encode_lines(portion) if len(portion) > 1 else await encode(portion[0]) + b"\n"
                await self._write(lines, send)
        if request.closed:
            raise ClientGone
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def read_body(scope: Scope, receive: Receive, max_bytes: int, admission: Admission) -> bytes:
    """The whole JSON body; refused as soon as it is known to be too large, whether announced or not."""
    headers = dict(reversed(scope["headers"]))  # of several with one name the first counts
    if headers.get(b"content-type") != b"application/json" or b"content-encoding" in headers:
        check_content_type(scope)
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise Refusal("body_too_large", f"{int(announced)} bytes; at most {max_bytes} are accepted")
    message = await receive()
    if message["type"] == "http.disconnect" or message.get("more_body", False) or len(message["body"]) > max_bytes:
        return await _read_parts(message, receive, max_bytes, admission)
    body: bytes = message["body"]
    return body


async def _read_parts(message: Message, receive: Receive, max_bytes: int, admission: Admission) -> bytes:
    """A body in several parts, of which `message` is the first. Charged while it arrives."""
    parts, size = [], 0
    with ArrivingBody(admission) as arriving:
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise Refusal("body_too_large", f"more than {size} bytes; at most {max_bytes} are accepted")
            if not message.get("more_body", False):
                return b"".join(parts)
            arriving.hold(size)
            message = await receive()


def check_content_type(scope: Scope) -> None:
    """A browser sends a foreign site's form without asking us first, but never as application/json."""
    media_type = header(scope, b"content-type").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise Refusal("wrong_content_type", f"the body must be application/json, not {media_type[:80] or 'unnamed'!r}")
    if header(scope, b"content-encoding").strip().lower() not in ("", "identity"):
        raise Refusal("wrong_content_type", "the body must not be compressed")


def header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def flag(scope: Scope, name: str, *, default: bool) -> bool:
    text = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True).get(name)
    if text is None:
        return default
    if text[-1].lower() not in _FLAGS:
        raise Refusal("bad_query", f"{name} must be true or false", field=name)
    return _FLAGS[text[-1].lower()]


def hot_routes(config: GatewayConfig, dispatch: Dispatch, validator: Validator) -> list[Route]:
    return [
        Route("/v1/batch", BatchEndpoint(config, dispatch, validator), methods=["POST"], name="batch"),
        Route("/v1/run", RunEndpoint(config, dispatch, validator), methods=["POST"], name="run"),
    ]


def plain_routes(
    config: GatewayConfig, dispatch: Dispatch, worker_registry: WorkerRegistry, metrics: Metrics, *, cluster: bool
) -> APIRouter:
    """A gateway of a cluster is ready when it can keep calls, whoever runs them; its metrics are at a port of their own."""
    router = APIRouter()

    @router.get("/healthz", summary="Is the process alive?", responses=answers(Health))
    async def healthz() -> Response:
        return _json(Health("ok"))

    @router.get("/readyz", summary="Can it run programs now?", responses=answers(Ready, "not_ready", "draining"))
    async def readyz() -> Response:
        check_ready(dispatch, worker_registry, cluster=cluster)
        return _json(Ready("ready", worker_registry.tier))

    @router.delete(
        "/v1/calls",
        summary="Cancel calls by their tags, or by the id of their request and their index in it; all given must match",
        responses=answers(Cancelled, "bad_query", "unauthenticated", "foreign_tenant", "foreign_origin"),
        openapi_extra={"parameters": query_parameters(Selection)},
    )
    async def cancel(request: Request) -> Response:
        selection = read_selection(request.scope["query_string"])
        account = account_of(request)
        if account is not None:
            try:
                selection = account.select(selection)
            except NotPermitted as refusal:
                refusal.field = "tenant"
                raise
        return _json(Cancelled(await dispatch.cancel(selection)))

    @router.get(
        "/v1/info", summary="What is here: version, isolation, slots, limits", responses=answers(Info, "unauthenticated")
    )
    async def info(request: Request) -> Response:
        return _json(info_of(config, worker_registry, account_of(request)))

    @router.get("/v1/tools", summary="Tools for a model, as OpenAI's chat completions take them", responses=answers(Tools))
    async def tools() -> Response:
        return _json(TOOLS)

    if not cluster:
        described = answers(Health, "unauthenticated", "operators_only") | {200: {"content": {"text/plain": {}}}}

        @router.get("/metrics", summary="Prometheus metrics", responses=described)
        async def metrics_page(request: Request) -> Response:
            facts: RequestFacts = request.scope["exec"]
            if not facts.sees_all:
                words = (
                    "the metrics show all tenants; use a key made by `exec-service keys add --operator`, or the metrics port"
                )
                raise Refusal("operators_only", words)
            return Response(metrics.text(), headers={"content-type": metrics_text.CONTENT_TYPE})

    return router


def account_of(request: Request) -> Account | None:
    facts: RequestFacts = request.scope["exec"]
    return facts.origin.account


def _json(message: msgspec.Struct) -> Response:
    return Response(encode_json(message), media_type="application/json")
