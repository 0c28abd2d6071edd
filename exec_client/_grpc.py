"""Calls over gRPC: needs grpcio and protobuf, the extra `grpc`. Loaded only when it is asked for.

The gRPC endpoint has no judging and verifying; these methods raise `UsageError`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import grpc
import msgspec

from exec_client import errors
from exec_client._transport import refusal
from exec_wire import Call, Cancelled, Info, Judge, Judgement, Result, Selection, Verification, Verify, proto
from exec_wire.problems import PROBLEMS, Problem

SECURE, PLAIN = "grpcs://", "grpc://"
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # as over HTTP: a cluster-wide proxy must not catch calls to localhost
    # A dead peer is noticed in 30 s, also while a long program is silent.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # the outbox paces itself
]
_NO_SERVICE = "failed to connect to all addresses"  # gRPC's message when no server listens

T = TypeVar("T")


class _SessionMethod(NamedTuple):
    name: str
    answer: proto.Message
    part: str = ""  # of a SessionRequest
    request: proto.Message = proto.SESSION_REQUEST
    unset: dict[str, Any] = {}  # fields that protobuf leaves out and our structs require


_SESSION_METHODS = {  # by verb, whether one session is meant, and what of it
    ("POST", False, ""): _SessionMethod("CreateSession", proto.SESSION_INFO, request=proto.SESSION_SPEC),
    ("GET", False, ""): _SessionMethod("ListSessions", proto.SESSION_LIST, request=proto.SELECTION, unset={"sessions": []}),
    ("GET", True, ""): _SessionMethod("GetSession", proto.SESSION_INFO, "tenant"),
    ("DELETE", True, ""): _SessionMethod("EndSession", proto.ENDED, "tenant"),
    ("POST", True, "run"): _SessionMethod("RunCell", proto.RESULT, "cell"),
    ("POST", True, "fork"): _SessionMethod("ForkSession", proto.SESSION_LIST, "fork", unset={"sessions": []}),
    ("POST", True, "rollback"): _SessionMethod("RollBackSession", proto.SESSION_INFO, "tenant"),
    ("POST", True, "interrupt"): _SessionMethod("InterruptSession", proto.INTERRUPTED, "tenant", unset={"interrupted": False}),
    ("PUT", True, "files"): _SessionMethod("PutFiles", proto.FILES, "files"),
    ("GET", True, "files"): _SessionMethod("FetchFiles", proto.FILES, "fetch"),
}


class GrpcTransport:
    """One HTTP/2 connection; each request is a `RunBatch` of its own, so that giving it up cancels it."""

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self._url = base_url
        self._target = base_url.removeprefix(SECURE).removeprefix(PLAIN).rstrip("/")
        self._metadata = tuple((headers or {}).items())
        self._channel: Any = None

    async def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        method = self._opened().unary_stream(f"/{proto.SERVICE}/RunBatch")
        metadata = {**dict(self._metadata), "x-request-id": request_id} if request_id else dict(self._metadata)
        answer = method(_request(calls), timeout=timeout_s, metadata=tuple(metadata.items()))
        try:
            async for message in answer:
                for fields in _read(proto.RESULT_BATCH, message).get("results", ()):
                    yield _converted(fields, Result)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            answer.cancel()

    async def judge(self, judge: Judge, timeout_s: float) -> Judgement:
        raise _not_here("judge")

    async def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        raise _not_here("verify")
        yield  # a generator, as the protocol wants it

    async def info(self, timeout_s: float) -> Info:
        return _converted(await self._ask("Info", proto.INFO_REQUEST.write(), proto.INFO, timeout_s), Info)

    async def cancel(self, selection: Selection, timeout_s: float) -> int:
        request = proto.SELECTION.write(**proto.plain(selection))
        fields = await self._ask("Cancel", request, proto.CANCELLED, timeout_s)
        return _converted({"cancelled": 0} | fields, Cancelled).cancelled

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        """What sessions ask over HTTP, as the method that does the same."""
        id, _, action = path.removeprefix("/v1/sessions").removeprefix("/").partition("/")
        method = _SESSION_METHODS[verb, bool(id), action]
        fields = {} if body is None else proto.plain(body)
        if method.part == "fetch":
            fields = {"paths": query["path"], "tenant": query["tenant"]}
        elif query is not None:
            fields = dict(query)
        if method.part:
            fields = {"session": unquote(id), method.part: fields}
        try:
            request = method.request.write(**fields)
        except (TypeError, ValueError) as error:
            raise errors.BadRequest(str(error), code="bad_field", status=PROBLEMS["bad_field"][0]) from error
        return _converted(method.unset | await self._ask(method.name, request, method.answer, timeout_s), answer)

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, name: str, request: bytes, answer: proto.Message, timeout_s: float) -> dict[str, Any]:
        method = self._opened().unary_unary(f"/{proto.SERVICE}/{name}")
        try:
            return _read(answer, await method(request, timeout=timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error

    def _opened(self) -> Any:
        """Made on first use: a channel belongs to the event loop that runs then."""
        if self._channel is None:
            if self._url.startswith(SECURE):
                self._channel = grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(), OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self._target, OPTIONS)
        return self._channel

    def _translated(self, error: Any) -> errors.ExecError:
        """The service's own word if it is there, as over HTTP; else what gRPC says about the connection."""
        code, details = error.code(), f"{self._url}: {error.details()}"
        for name, value in error.trailing_metadata() or ():
            if name == proto.PROBLEM:
                return _refused(value)
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                return errors.ConnectionFailed(details, sent=_NO_SERVICE not in details)
            case grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return errors.ConnectionFailed(details)
            case grpc.StatusCode.RESOURCE_EXHAUSTED:  # overload would have come with the service's own word
                status, _ = PROBLEMS["body_too_large"]
                return errors.TooLarge(details, code="body_too_large", status=status)
            case grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.NOT_FOUND:
                return errors.ProtocolError(f"{details}; is this the gRPC address of the service?")
            case _:
                return errors.ServiceFailed(details)


def _refused(encoded: bytes) -> errors.ExecError:
    try:
        told = msgspec.json.decode(encoded, type=Problem)
    except ValueError as error:
        return errors.ProtocolError(f"a refusal cannot be read: {error}", retryable=True)
    return refusal(told.status, {}, encoded)


def _request(calls: Sequence[Call]) -> bytes:
    try:
        return proto.CALL_BATCH.write(calls=[proto.plain(call) for call in calls])
    except (ValueError, TypeError) as error:
        status, _ = PROBLEMS["bad_field"]
        raise errors.BadRequest(f"does not fit into a message: {error}", code="bad_field", status=status) from error


def _read(message: proto.Message, data: bytes) -> dict[str, Any]:
    try:
        return message.read(data)
    except proto.NotProto as error:
        raise errors.ProtocolError(f"the answer is not what the service sends: {error}", retryable=True) from error


def _converted(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise errors.ProtocolError(f"the answer is not what the service sends: {error}", retryable=True) from error


def _not_here(name: str) -> errors.UsageError:
    return errors.UsageError(f"{name} goes over HTTP only: use a client with the service's http address")
