"""Calls over gRPC: needs grpcio and protobuf, the extra `grpc`. Loaded only when it is asked for.

The gRPC endpoint has no judging and verifying; these methods raise `UsageError`.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import grpc
import msgspec

from exec_client import errors
from exec_client._transport import Transport, refusal
from exec_wire import Call, Result, Verification, Verify, proto
from exec_wire.problems import PROBLEMS, Problem

SECURE, PLAIN = "grpcs://", "grpc://"
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # as over HTTP: a cluster-wide proxy must not catch calls to localhost
    # A dead peer is noticed in 45 s, also while a long program is silent; a busy one has 30 s to answer.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # the outbox paces itself
]
_NO_SERVICE = "failed to connect to all addresses"  # gRPC's message when no server listens

T = TypeVar("T")


class _Method(NamedTuple):
    name: str
    answer: proto.Message
    part: str = ""  # of a SessionRequest
    request: proto.Message = proto.SESSION_REQUEST
    unset: dict[str, Any] = {}  # fields that protobuf leaves out and our structs require


_METHODS = {  # by verb and path, where * is the id of a session
    "GET info": _Method("Info", proto.INFO, request=proto.INFO_REQUEST),
    "DELETE calls": _Method("Cancel", proto.CANCELLED, request=proto.SELECTION, unset={"cancelled": 0}),
    "POST sessions": _Method("CreateSession", proto.SESSION_INFO, request=proto.SESSION_SPEC),
    "GET sessions": _Method("ListSessions", proto.SESSION_LIST, request=proto.SELECTION, unset={"sessions": []}),
    "GET sessions/*": _Method("GetSession", proto.SESSION_INFO, "tenant"),
    "DELETE sessions/*": _Method("EndSession", proto.ENDED, "tenant"),
    "POST sessions/*/run": _Method("RunCell", proto.RESULT, "cell"),
    "POST sessions/*/fork": _Method("ForkSession", proto.SESSION_LIST, "fork", unset={"sessions": []}),
    "POST sessions/*/rollback": _Method("RollBackSession", proto.SESSION_INFO, "tenant"),
    "POST sessions/*/interrupt": _Method("InterruptSession", proto.INTERRUPTED, "tenant", unset={"interrupted": False}),
    "PUT sessions/*/files": _Method("PutFiles", proto.FILES, "files"),
    "GET sessions/*/files": _Method("FetchFiles", proto.FILES, "fetch"),
}


class GrpcTransport(Transport):
    """One HTTP/2 connection; each request is a `RunBatch` of its own, so that giving it up cancels it."""

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self._url = base_url
        self._target = base_url.removeprefix(SECURE).removeprefix(PLAIN).rstrip("/")
        self._metadata = tuple((headers or {}).items())
        self._channel: Any = None

    async def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        method = self._opened().unary_stream(f"/{proto.SERVICE}/RunBatch")
        request = _written(proto.CALL_BATCH, {"calls": [proto.plain(call) for call in calls]})
        metadata = {**dict(self._metadata), "x-request-id": request_id} if request_id else dict(self._metadata)
        answer = method(request, timeout=timeout_s, metadata=tuple(metadata.items()))
        try:
            async for message in answer:
                for fields in _understood(proto.RESULT_BATCH.read, message).get("results", ()):
                    yield _understood(msgspec.convert, fields, Result)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            answer.cancel()

    async def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        raise _not_here("verify")
        yield  # a generator, as the protocol wants it

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        """What is asked over HTTP, as the method that does the same."""
        kind, id, action, *_ = [*path.removeprefix("/v1/").split("/"), "", ""]
        method = _METHODS.get(f"{verb} {'/'.join(part for part in (kind, id and '*', action) if part)}")
        if method is None:
            raise _not_here(kind)
        fields = {} if body is None else proto.plain(body)
        if method.part == "fetch":
            fields = {"paths": query["path"], "tenant": query["tenant"]}
        elif query is not None:
            fields = dict(query)
        if method.part:
            fields = {"session": unquote(id), method.part: fields}
        send = self._opened().unary_unary(f"/{proto.SERVICE}/{method.name}")
        request = _written(method.request, fields)
        try:
            sent_back = await send(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._translated(error) from error
        made: T = _understood(msgspec.convert, method.unset | _understood(method.answer.read, sent_back), answer)
        return made

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()

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


def _written(message: proto.Message, fields: dict[str, Any]) -> bytes:
    try:
        return message.write(**fields)
    except (ValueError, TypeError) as error:
        status, _ = PROBLEMS["bad_field"]
        raise errors.BadRequest(f"does not fit into a message: {error}", code="bad_field", status=status) from error


def _understood(read: Callable[..., T], *given: Any) -> T:
    try:
        return read(*given)
    except ValueError as error:  # bytes that are no such message, or a field of another type
        raise errors.ProtocolError(f"the answer is not what the service sends: {error}", retryable=True) from error


def _not_here(name: str) -> errors.UsageError:
    return errors.UsageError(f"{name} goes over HTTP only: use a client with the service's http address")
