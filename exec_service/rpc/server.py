"""The gRPC endpoints: decode, dispatch, encode. `exec_wire/proto/exec.proto` says what it speaks.

Handlers get and give bytes, so that bytes that are no message are answered like any other bad input. All of them take a stream
of requests, also those that expect one: so a message is read only when the caller's key was checked. Importing this loads grpc,
after which nothing may fork; what is exec'd may.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from msgspec.structs import force_setattr

from exec_service.api.encoding import LARGE_CHARS, portions, write_proto
from exec_service.api.info import check_ready, info_of
from exec_service.api.middleware import RequestFacts, origin_of
from exec_service.api.streaming import or_keep_alive
from exec_service.api.validation import SMALL_BYTES, Validator, Warnings, make_selection
from exec_service.dispatch.admission import ArrivingBody
from exec_service.dispatch.requests import CallRequest, Origin
from exec_service.refusals import Refusal
from exec_service.rpc.reflection import Reflection, served
from exec_service.rpc.session_methods import SESSION_METHODS, SessionMethod
from exec_service.sessions import with_warnings
from exec_service.telemetry.logs import log_request
from exec_wire import proto
from exec_wire.messages.calls import Call, Result, encode_json
from exec_wire.problems import PROBLEMS, Problem, problem

if TYPE_CHECKING:
    from exec_service.app import Gateway

log = logging.getLogger("exec_service.grpc")
requests_log = logging.getLogger("exec_service.requests")

MANY = 1 << 20
OPTIONS = [
    # gRPC drops what exceeds these, 1,000 requests by default, as CANCELLED. Admission is ours, and says when to come again.
    ("grpc.server.max_pending_requests", MANY),
    ("grpc.server.max_pending_requests_hard_limit", MANY),
    ("grpc.max_concurrent_streams", MANY),
    # A dead peer is noticed, and its calls cancelled, in 50 s; clients may ask whether we live every 5 s. On a busy machine a
    # peer that lives may take more than ten seconds to answer.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
HEALTH = "grpc.health.v1.Health"
HEALTH_WATCH_S = 1.0
HEALTH_READS, HEALTH_READ_S = 2, 1.0  # messages of callers without a key that are read at once, and for how long
# A message that has not come by then is charged as the largest: gRPC does not show how much of it is here. The time is counted
# in turns of the event loop, so that a gateway that is slow to read messages does not charge its callers for it.
SLOW_S, SLOW_TURNS = 5.0, 10
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    410: grpc.StatusCode.DATA_LOSS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_OWN_CODES = {
    "idempotency_conflict": grpc.StatusCode.ALREADY_EXISTS,
    "tier_unavailable": grpc.StatusCode.FAILED_PRECONDITION,
}

Context = Any  # grpc.aio.ServicerContext, which has no types
T = TypeVar("T")
Work = Callable[[RequestFacts, Context], Awaitable[T]]  # of one method


def status_code(code: str) -> Any:
    """The gRPC status that one of our problem codes travels under."""
    return _OWN_CODES.get(code) or _CODES[PROBLEMS[code][0]]


class ClientGone(Exception):
    """It reads nothing any more."""


class GrpcServer:
    def __init__(self, gateway: Gateway) -> None:
        self._config, self._dispatch, self._worker_registry = gateway.config, gateway.dispatch, gateway.worker_registry
        self._metrics, self._keys, self._router = gateway.metrics, gateway.keys, gateway.sessions
        self._validator = Validator(gateway.worker_registry, gateway.config)
        self._cluster = gateway.cluster
        self._server: Any = None
        self._readers: set[asyncio.Task[None]] = set()  # of open streams
        self._health_reads = 0

    # -- life -------------------------------------------------------------------------------------------------------------

    async def start(self, address: str, max_connections: int, *, shared: bool = False) -> int:
        """Listen, and say on which port. `shared`: other processes of this gateway have it too. Raises `RuntimeError` if the
        address is taken."""
        config = self._config
        limits = [
            ("grpc.so_reuseport", int(shared)),  # else a second service would silently take half of the connections
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", int(config.header_s * 1000)),
            ("grpc.max_connection_idle_ms", config.keep_alive_s * 1000),
        ]
        self._server = grpc.aio.server(options=[*OPTIONS, *limits])
        self._server.add_generic_rpc_handlers((self._methods(), self._health_methods()))
        names = [proto.SERVICE, HEALTH, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(names, served(), self._check_key), self._server)
        port: int = self._server.add_insecure_port(address)
        await self._server.start()
        return port

    def finish_streams(self) -> None:
        """Read nothing more from open streams; each ends when what it has accepted is answered."""
        for reader in self._readers:
            reader.cancel()

    async def hand_over(self, grace_s: float) -> None:
        """Leave new connections and requests to the other processes at the same port; finish those that have begun."""
        self.finish_streams()
        await self.stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    def _methods(self) -> Any:
        streams: dict[str, Work[None]] = {"RunBatch": self._run_batch, "Stream": self._stream}
        unary: dict[str, Work[bytes]] = {"Run": self._run, "Cancel": self._cancel, "Info": self._info}
        unary |= {name: partial(self._ask_session, method) for name, method in SESSION_METHODS.items()}
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(partial(self._serve, name, work)) for name, work in unary.items()
        }
        for name, work in streams.items():
            handlers[name] = grpc.stream_stream_rpc_method_handler(partial(self._serve, name, work))
        return grpc.method_handlers_generic_handler(proto.SERVICE, handlers)

    # -- methods ----------------------------------------------------------------------------------------------------------

    async def _run(self, facts: RequestFacts, context: Context) -> bytes:
        fields = self._read(proto.CALL, await self._message(context))
        call = self._validator.read_call(fields, facts.origin.warnings)
        self._shorten_deadlines([call], context)
        async with self._dispatch.run([call], facts.origin) as request:
            facts.calls = 1
            await request.changed.wait()
            [result] = request.arrived
            if request.arrived_bytes <= LARGE_CHARS:
                return proto.RESULT.write(**proto.plain(result))
            return await asyncio.to_thread(lambda: proto.RESULT.write(**proto.plain(result)))

    async def _run_batch(self, facts: RequestFacts, context: Context) -> None:
        fields = self._read(proto.CALL_BATCH, await self._message(context))
        calls = self._validator.read_batch({"calls": []} | fields, facts.origin.warnings)
        self._shorten_deadlines(calls, context)
        async with self._dispatch.run(calls, facts.origin, "$.calls[{}]") as request:
            facts.calls = len(calls)
            await self._write_all(request, context, asyncio.Lock())

    async def _stream(self, facts: RequestFacts, context: Context) -> None:
        writing = asyncio.Lock()  # gRPC takes one message at a time
        async with self._dispatch.run([], facts.origin, expecting=True) as request:
            reader = asyncio.create_task(self._read_stream(request, facts, context, writing))
            self._readers.add(reader)
            try:
                await self._write_all(request, context, writing)
                with suppress(asyncio.CancelledError):  # by `finish_streams`
                    await reader
            finally:
                reader.cancel()
                self._readers.discard(reader)

    async def _read_stream(self, request: CallRequest, facts: RequestFacts, context: Context, writing: asyncio.Lock) -> None:
        sent = 0
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                fields = self._read(proto.CALL_BATCH, message)
                count = len(fields.get("calls", ()))
                try:
                    await self._join(request, fields, context, sent)
                    facts.calls += count
                except Refusal as refusal:
                    if refusal.code == "unauthenticated":
                        raise
                    await self._write_refusal(refusal, request.origin, sent, count, context, writing)
                sent += count
        finally:
            request.expect_no_more()

    async def _join(self, request: CallRequest, fields: dict[str, Any], context: Context, first_index: int) -> None:
        if request.origin.account is not self._account(context):  # the key may have been taken back since the stream was opened
            raise Refusal("unauthenticated", "this key belongs to another tenant now")
        self._dispatch.check_open()
        warnings: Warnings = {}
        calls = self._validator.read_batch({"calls": []} | fields, warnings)
        known = {first_index + index: words for index, words in warnings.items()}
        request.origin.warnings.update(known)
        try:
            self._shorten_deadlines(calls, context)
            await self._dispatch.join(request, calls, first_index, "$.calls[{}]")
        except BaseException:
            for index in known:
                request.origin.warnings.pop(index, None)
            raise

    async def _cancel(self, facts: RequestFacts, context: Context) -> bytes:
        request = await self._message(context)
        if len(request) > SMALL_BYTES:  # a packed list becomes large before it is counted
            raise Refusal("bad_message", f"a selection of {len(request)} bytes; at most {SMALL_BYTES} are read")
        try:
            selection = make_selection(proto.SELECTION.read(request))
        except proto.NotProto as error:
            raise Refusal("bad_message", str(error)) from None
        if facts.origin.account is not None:
            selection = facts.origin.account.select(selection)
        return proto.CANCELLED.write(cancelled=await self._dispatch.cancel(selection))

    async def _info(self, facts: RequestFacts, _: Context) -> bytes:
        return proto.INFO.write(**proto.plain(info_of(self._config, self._worker_registry, facts.origin.account)))

    async def _ask_session(self, method: SessionMethod, facts: RequestFacts, context: Context) -> bytes:
        request, origin = await self._message(context), facts.origin
        asked = self._read(method.request, request)
        with self._dispatch.reserve(1, len(request), origin):
            answer = await method.ask(self._router, self._validator, asked, origin)
        answer = with_warnings(answer, origin.warnings)
        return await write_proto([answer], lambda: method.answer.write(**proto.plain(answer)))

    # -- in ---------------------------------------------------------------------------------------------------------------

    async def _message(self, context: Context) -> bytes:
        """The message of a request that has one. How much of it is here cannot be seen, so it is charged by time."""
        loop, refused = asyncio.get_running_loop(), list[Refusal]()
        slow: asyncio.TimerHandle

        def charge(turns: int) -> None:
            nonlocal slow
            if turns:
                slow = loop.call_later(SLOW_S / SLOW_TURNS, charge, turns - 1)
                return
            try:
                arriving.enter_context(ArrivingBody(self._dispatch.admission)).hold(self._config.max_body_bytes)
            except Refusal as refusal:
                refused.append(refusal)
                limit.reschedule(loop.time())

        with ExitStack() as arriving:
            slow = loop.call_later(SLOW_S / SLOW_TURNS, charge, SLOW_TURNS - 1)
            try:
                async with asyncio.timeout(self._config.body_s) as limit:
                    message = await context.read()
            except TimeoutError:
                raise refused[0] if refused else Refusal("too_slow", "the message did not come to an end in time") from None
            finally:
                slow.cancel()
        if message is grpc.aio.EOF:
            raise Refusal("bad_message", "the request has no message")
        return message  # type: ignore[no-any-return]

    def _read(self, message: proto.Message, request: bytes) -> dict[str, Any]:
        if self._dispatch.draining or self._dispatch.not_ready_because:
            self._dispatch.check_open()  # before what a call asks for is compared with what is there
        if len(request) > SMALL_BYTES:
            most, most_calls = self._config.max_strings_per_request // 2, self._config.max_calls_per_request
            if not message.has_at_most(request, most if message is proto.CALL_BATCH else proto.MOST_IN_PART, most_calls):
                raise Refusal("too_many_calls", f"more than {most_calls} calls or {most} fields; no more fit in one message")
        try:
            return message.read(request)
        except proto.NotProto as error:
            raise Refusal("bad_message", str(error)) from None

    def _shorten_deadlines(self, calls: Sequence[Call], context: Context) -> None:
        """Nobody waits for a call longer than for its request."""
        left_s = context.time_remaining()
        if left_s is not None:
            for call in calls:
                if call.deadline_s > left_s:
                    force_setattr(call, "deadline_s", max(left_s, 0.001))

    def _account(self, context: Context) -> Any:
        metadata = dict(reversed(context.invocation_metadata() or ()))
        return None if self._keys is None else self._keys.account(metadata.get("authorization", ""))

    async def _check_key(self, context: Context) -> None:
        try:
            self._account(context)
        except Refusal as refusal:
            await context.abort(status_code(refusal.code), refusal.detail)

    # -- out --------------------------------------------------------------------------------------------------------------

    async def _write_all(self, request: CallRequest, context: Context, writing: asyncio.Lock) -> None:
        while arrived := await or_keep_alive(request.take, partial(self._write, b"", context, writing)):
            await self._write_results(arrived, context, writing)

    async def _write_results(self, results: list[Result], context: Context, writing: asyncio.Lock) -> None:
        for portion in portions(results):
            message = await write_proto(portion, partial(_result_batch, portion))
            await self._write(message, context, writing)

    async def _write_refusal(
        self, refusal: Refusal, origin: Origin, index: int, calls: int, context: Context, writing: asyncio.Lock
    ) -> None:
        self._metrics.rejected(refusal.code)
        facts = RequestFacts(origin, calls=calls, code=refusal.code)
        log_request(logging.WARNING, facts, 0.0, method="gRPC", route="Stream", status=status_code(refusal.code).name)
        refused = {"index": index, "calls": calls, "problem": proto.plain(_problem(refusal, origin))}
        await self._write(proto.RESULT_BATCH.write(refused=[refused]), context, writing)

    async def _write(self, message: bytes, context: Context, writing: asyncio.Lock) -> None:
        try:
            async with asyncio.timeout(self._config.write_stall_s), writing:
                await context.write(message)
        except TimeoutError:
            raise ClientGone from None

    # -- around every method ----------------------------------------------------------------------------------------------

    async def _serve(self, method: str, work: Work[T], _: object, context: Context) -> T:
        began = time.monotonic()
        metadata = dict(reversed(context.invocation_metadata() or ()))  # of several with one name the first counts
        facts = RequestFacts(origin_of(metadata.get("x-request-id", ""), metadata.get("traceparent", "")))
        status = "CANCELLED"
        try:
            context.set_trailing_metadata((("x-request-id", facts.origin.request_id),))
            if self._keys is not None:
                facts.origin = msgspec.structs.replace(facts.origin, account=self._account(context))
            answer = await work(facts, context)
            status = "OK"
            return answer
        except Refusal as refusal:
            status, facts.code = status_code(refusal.code).name, refusal.code
            await self._abort(context, refusal, facts.origin)
        except ClientGone:
            await context.abort(grpc.StatusCode.CANCELLED, "the client read nothing for too long")
        except Exception:
            # The outermost catch: the details go to the log, not to the caller.
            log.exception("unhandled error", extra={"request_id": facts.origin.request_id})
            status, facts.code = "INTERNAL", "internal"
            await self._abort(context, Refusal("internal", "see the service's log for this request id"), facts.origin)
        finally:
            self._metrics.grpc_requests.counts[method, status] += 1
            level = logging.WARNING if facts.code else logging.INFO
            if requests_log.isEnabledFor(level):
                log_request(level, facts, time.monotonic() - began, method="gRPC", route=method, status=status)
        raise AssertionError("abort raises")

    async def _abort(self, context: Context, refusal: Refusal, origin: Origin) -> None:
        self._metrics.rejected(refusal.code)
        told = _problem(refusal, origin)
        trailing = (
            (proto.CODE, refusal.code),
            (proto.PROBLEM, encode_json(told)),
            ("x-request-id", origin.request_id),
        )
        where = f" ({told.field})" if told.field else ""
        await context.abort(status_code(refusal.code), f"{told.detail or told.title}{where}", trailing)

    # -- health: open, as /readyz is --------------------------------------------------------------------------------------

    def _health_methods(self) -> Any:
        serializer = health_pb2.HealthCheckResponse.SerializeToString
        return grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": grpc.stream_unary_rpc_method_handler(self._check_health, response_serializer=serializer),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch_health, response_serializer=serializer),
            },
        )

    async def _check_health(self, _: object, context: Context) -> Any:
        if not await self._is_about_us(context):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is {proto.SERVICE} here")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def _watch_health(self, _: object, context: Context) -> None:
        about_us, told = await self._is_about_us(context), None
        while True:
            now = self._health() if about_us else "SERVICE_UNKNOWN"
            if now != told:
                await context.write(health_pb2.HealthCheckResponse(status=now))
                told = now
            await asyncio.sleep(HEALTH_WATCH_S)

    async def _is_about_us(self, context: Context) -> bool:
        """Whether the service that is asked about is ours. Nobody needs a key here, and a message can be large: only a few are
        read at the same time, and the others are taken to ask about the whole."""
        if self._health_reads == HEALTH_READS:
            return True
        self._health_reads += 1
        try:
            async with asyncio.timeout(HEALTH_READ_S):
                message = await context.read()
            return message is grpc.aio.EOF or health_pb2.HealthCheckRequest.FromString(message).service in ("", proto.SERVICE)
        except TimeoutError:
            return True
        except DecodeError:
            return False
        finally:
            self._health_reads -= 1

    def _health(self) -> str:
        try:
            check_ready(self._dispatch, self._worker_registry, cluster=self._cluster)
        except Refusal:
            return "NOT_SERVING"
        return "SERVING"


def _result_batch(results: list[Result]) -> bytes:
    return proto.RESULT_BATCH.write(results=[proto.plain(result) for result in results])


def _problem(refusal: Refusal, origin: Origin) -> Problem:
    return problem(
        refusal.code,
        refusal.detail,
        field=refusal.field,
        request_id=origin.request_id,
        retry_after_s=refusal.retry_after_s,
    )
