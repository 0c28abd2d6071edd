"""The HTTP endpoints: decode, dispatch, encode.

The two hot routes are plain ASGI endpoints: FastAPI's own request handling costs several times what the rest of the
gateway does per request. The others are ordinary FastAPI routes.
"""

import asyncio
from functools import partial
from urllib.parse import parse_qs

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import Headers
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
from exec_service.refusals import Overloaded, Refusal
from exec_service.sessions import permitted
from exec_service.tenants.accounts import Account
from exec_wire.messages.calls import Cancelled, Result, Selection, encode_json
from exec_wire.messages.stats import Info

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
        """The whole JSON body; refused as soon as it is known to be too large, whether announced or not."""
        max_bytes, dispatch = self._config.max_body_bytes, self._dispatch
        headers = dict(reversed(scope["headers"]))  # of several with one name the first counts
        if headers.get(b"content-type") != b"application/json" or b"content-encoding" in headers:
            check_content_type(scope)
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > max_bytes:
            raise Refusal("body_too_large", f"{int(announced)} bytes; at most {max_bytes} are accepted")
        message = await receive()
        body: bytes = message.get("body", b"")
        if message["type"] == "http.disconnect" or message.get("more_body", False) or len(body) > max_bytes:
            body = await _read_parts(message, receive, max_bytes, dispatch.admission)
        facts.body_bytes = len(body)
        if dispatch.draining or dispatch.not_ready_because:
            dispatch.check_open()  # before what a call asks for is compared with what is there
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
                await request.changed.wait()
            if request.closed:
                raise ClientGone
            [result] = request.arrived
            is_small = request.arrived_bytes <= LARGE_CHARS
            await self._send_json(encode_json(result) if is_small else await encode(result), send)


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
        if self._dispatch.admission.bytes > self._dispatch.admission.max_bytes:
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


def check_content_type(scope: Scope, *accepted: str) -> None:
    """A browser sends a foreign site's form without asking us first, but never as one of these."""
    headers, accepted = Headers(scope=scope), accepted or ("application/json",)
    media_type = headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in accepted:
        raise Refusal("wrong_content_type", f"the body must be {accepted[0]}, not {media_type[:80] or 'unnamed'!r}")
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        raise Refusal("wrong_content_type", "the body must not be compressed")


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


def plain_routes(config: GatewayConfig, dispatch: Dispatch, worker_registry: WorkerRegistry, *, cluster: bool) -> APIRouter:
    """A gateway of a cluster is ready when it can keep calls, wherever they run."""
    router = APIRouter()

    @router.get("/healthz", summary="Is the process alive?", responses=answers(Health))
    async def healthz() -> Response:
        return json_response(Health("ok"))

    @router.get("/readyz", summary="Can it run programs now?", responses=answers(Ready, "not_ready", "draining"))
    async def readyz() -> Response:
        check_ready(dispatch, worker_registry, cluster=cluster)
        return json_response(Ready("ready", worker_registry.tier))

    @router.delete(
        "/v1/calls",
        summary="Cancel calls by their tags, or by the id of their request and their index in it; all given must match",
        responses=answers(Cancelled, "bad_query", "unauthenticated", "foreign_tenant", "foreign_origin"),
        openapi_extra={"parameters": query_parameters(Selection)},
    )
    async def cancel(request: Request) -> Response:
        selection = read_selection(request.scope["query_string"])
        if (account := account_of(request)) is not None:
            with permitted(""):
                selection = account.select(selection)
        return json_response(Cancelled(await dispatch.cancel(selection)))

    @router.get(
        "/v1/info", summary="What is here: version, isolation, slots, limits", responses=answers(Info, "unauthenticated")
    )
    async def info(request: Request) -> Response:
        return json_response(info_of(config, worker_registry, account_of(request)))

    @router.get("/v1/tools", summary="Tools for a model, as OpenAI's chat completions take them", responses=answers(Tools))
    async def tools() -> Response:
        return json_response(TOOLS)

    return router


def account_of(request: Request) -> Account | None:
    facts: RequestFacts = request.scope["exec"]
    return facts.origin.account


def json_response(message: msgspec.Struct, status: int = 200) -> Response:
    return Response(encode_json(message), status, media_type="application/json")
