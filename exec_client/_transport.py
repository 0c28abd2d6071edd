"""How calls travel: the Transport protocol, HTTP, and one service behind several addresses.

A transport sends one request and yields what comes back. It knows no retries, no deadlines of single calls and no users;
whatever goes wrong inside it leaves as an `exec_client.errors` error, translated here and nowhere else.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol, TypeVar

import httpx
import msgspec

from exec_client import errors
from exec_wire import (
    Batch,
    Call,
    Cancelled,
    Info,
    Judge,
    Judgement,
    Result,
    Selection,
    Verification,
    Verify,
    VerifyBatch,
    decode_result,
    encode_json,
)
from exec_wire.messages.judging import decode_verification
from exec_wire.problems import Problem

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_GRPC_URL = "grpc://127.0.0.1:50051"
API_KEY_VARIABLE = "EXEC_API_KEY"
REST_S = 1.0  # of one of several addresses that did not answer

TransportName = Literal["http", "grpc"]
CALLER_ERRORS: dict[int, type[errors.CallerError]] = {
    **dict.fromkeys((400, 422), errors.BadRequest),
    **dict.fromkeys((401, 403), errors.Forbidden),
    409: errors.Conflict,
    413: errors.TooLarge,
}
T = TypeVar("T")


def with_key(headers: Mapping[str, str] | None, api_key: str | None) -> dict[str, str]:
    """The headers with the key that was given, else that of EXEC_API_KEY; an Authorization of the user's own stays."""
    named = {name.lower(): value for name, value in (headers or {}).items()}
    key = (api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE, "")).strip()
    if key and (api_key is not None or "authorization" not in named):
        named["authorization"] = f"Bearer {key}"
    return named


def check_url(base_url: str, kind: TransportName | None = None) -> tuple[TransportName, str]:
    """What to speak, and to whom: as the address says, or the usual address for what is to be spoken."""
    if not base_url:
        return ("grpc", DEFAULT_GRPC_URL) if kind == "grpc" else ("http", DEFAULT_URL)
    schemes = {"http": ("http://", "https://"), "grpc": ("grpc://", "grpcs://")}
    for name, known in schemes.items():
        if kind in (None, name) and base_url.startswith(known):
            return name, base_url  # type: ignore[return-value]
    wanted = " or ".join(scheme for name, known in schemes.items() if kind in (None, name) for scheme in known)
    raise ValueError(f"the service's address must start with {wanted}, got {base_url!r}")


def addresses_of(base_url: str) -> list[str]:
    """One service may have several addresses, with commas between them; none given is one, the usual."""
    return [address.strip() for address in base_url.split(",")]


def make_transport(base_url: str, headers: Mapping[str, str], kind: TransportName | None) -> Transport:
    transports = [_transport_to(address, headers, kind) for address in addresses_of(base_url)]
    return transports[0] if len(transports) == 1 else SeveralTransports(transports)


def _transport_to(address: str, headers: Mapping[str, str], kind: TransportName | None) -> Transport:
    kind, url = check_url(address, kind)
    if kind == "http":
        return HttpTransport(url, headers=headers)
    try:
        from exec_client._grpc import GrpcTransport
    except ImportError as error:
        raise errors.UsageError(f"gRPC needs the extra `grpc`: pip install 'exec-client[grpc]' ({error})") from error
    return GrpcTransport(url, headers=headers)


class Transport(Protocol):
    """What a client needs of a transport. Used on one event loop only. One that derives from this has `judge`, `info` and
    `cancel` by its `ask`."""

    def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        """Send one request; yield each result as it arrives, in any order, `index` being the position in `calls`.

        `request_id` is what the service is to know the request by; `cancel` names single calls of it by that and their index.
        Closing the generator early gives the request up, which tells the service to cancel it. `timeout_s` limits the
        time without data. A problem with one call is a `CallerError` whose `field` starts with `$.calls[i]`.
        """
        ...

    async def judge(self, judge: Judge, timeout_s: float) -> Judgement:
        return await self.ask("POST", "/v1/judge", Judgement, timeout_s, body=judge)

    def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        """As `send`."""
        ...

    async def info(self, timeout_s: float) -> Info:
        return await self.ask("GET", "/v1/info", Info, timeout_s)

    async def cancel(self, selection: Selection, timeout_s: float) -> int:
        """Have the service cancel the calls that `selection` picks; how many they were."""
        return (await self.ask("DELETE", "/v1/calls", Cancelled, timeout_s, msgspec.to_builtins(selection))).cancelled

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        """One small request and its answer."""
        ...

    async def aclose(self) -> None: ...


class HttpTransport(Transport):
    """`POST /v1/batch` over pooled HTTP/1.1 connections.

    Proxy settings in the environment are ignored: a cluster-wide HTTP_PROXY must not catch calls to localhost. Dead peers
    are noticed by TCP keep-alive in about 30 s, also while a long program is silent. `library` may be httpx2, which has the
    same interface.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 5.0,
        library: Any = httpx,
    ) -> None:
        check_url(base_url)
        self._url = base_url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._library = library
        self._http = library.AsyncClient(
            # A compressing proxy would hold lines back until its block is full.
            headers={"accept-encoding": "identity", **(headers or {})},
            transport=library.AsyncHTTPTransport(
                verify=base_url.startswith("https:"),  # loading certificates takes 20 ms; redirects are not followed
                # The outbox bounds how many requests are open. Idle ones are dropped before uvicorn closes them after 5 s.
                limits=library.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
                socket_options=_keep_alive_options(),
            ),
        )

    def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        return self._stream("/v1/batch", Batch(list(calls)), decode_result, timeout_s, request_id)

    def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        return self._stream("/v1/verify", VerifyBatch(list(items)), decode_verification, timeout_s)

    async def _stream(
        self, path: str, message: msgspec.Struct, decode: Callable[[bytes], T], timeout_s: float, request_id: str = ""
    ) -> AsyncGenerator[T, None]:
        headers = {"content-type": "application/json", "accept": "application/x-ndjson"}
        if request_id:
            headers["x-request-id"] = request_id
        try:
            async with self._http.stream(
                "POST", f"{self._url}{path}", content=encode_json(message), headers=headers, timeout=self._timeout(timeout_s)
            ) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, response.headers, await response.aread())
                if not (given := response.headers.get("content-type") or "of no type").startswith("application/x-ndjson"):
                    raise errors.ProtocolError(f"the answer is {given}, not NDJSON; is this the address of the service?")
                async for line in split_lines(response.aiter_bytes()):
                    yield _decode(line, decode)
        except self._library.RequestError as error:
            raise self._translated(error) from error

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        sent = {} if body is None else {"content": encode_json(body), "headers": {"content-type": "application/json"}}
        try:
            response = await self._http.request(
                verb, f"{self._url}{path}", params=query, timeout=self._timeout(timeout_s), **sent
            )
        except self._library.RequestError as error:
            raise self._translated(error) from error
        if response.status_code != 200:
            raise refusal(response.status_code, response.headers, response.content)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except ValueError as error:
            raise errors.ProtocolError(f"{self._url}{path} did not answer as the service does: {error}") from error

    async def aclose(self) -> None:
        await self._http.aclose()

    def _timeout(self, timeout_s: float) -> Any:
        connect_s = min(self._connect_timeout_s, timeout_s)
        return self._library.Timeout(connect=connect_s, read=timeout_s, write=timeout_s, pool=connect_s)

    def _translated(self, error: Exception) -> errors.ConnectionFailed:
        unsent = (self._library.ConnectError, self._library.ConnectTimeout, self._library.PoolTimeout)
        detail = str(error) or type(error).__name__
        return errors.ConnectionFailed(f"{self._url}: {detail}", sent=not isinstance(error, unsent))


class SeveralTransports(Transport):
    """One service behind several addresses, such as the gateways of a cluster that nothing stands in front of.

    Requests go to the addresses in turn. One that does not answer, or says that it is not ready, rests for a while; a request
    that cannot have reached it goes to the next at once. The caller decides whether a request that may have been started is
    sent again (`exec_client._outbox`). Closing this closes each transport.
    """

    def __init__(self, transports: Sequence[Transport], clock: Callable[[], float] = time.monotonic) -> None:
        self._transports, self._clock = list(transports), clock
        self._rests_until = [float("-inf")] * len(transports)
        self._turn = 0

    def send(self, calls: Sequence[Call], timeout_s: float, request_id: str = "") -> AsyncGenerator[Result, None]:
        return self._stream(lambda transport: transport.send(calls, timeout_s, request_id))

    def verify(self, items: Sequence[Verify], timeout_s: float) -> AsyncGenerator[Verification, None]:
        return self._stream(lambda transport: transport.verify(items, timeout_s))

    async def ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float, query: Any = None, body: msgspec.Struct | None = None
    ) -> T:
        positions = self._in_turn()
        for position in positions:
            try:
                return await self._transports[position].ask(verb, path, answer, timeout_s, query, body)
            except (errors.ConnectionFailed, errors.NotReady) as error:
                self._rest(position, error, last=position == positions[-1])
        raise AssertionError("the last one answers or raises")

    async def aclose(self) -> None:
        for transport in self._transports:
            await transport.aclose()

    async def _stream(self, begin: Callable[[Transport], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        positions = self._in_turn()
        for position in positions:
            try:
                async with aclosing(begin(self._transports[position])) as answers:
                    async for answer in answers:
                        yield answer
                return
            except (errors.ConnectionFailed, errors.NotReady) as error:
                self._rest(position, error, last=position == positions[-1])

    def _in_turn(self) -> list[int]:
        """Those that rest come last: they are still better than none."""
        first, self._turn = self._turn, (self._turn + 1) % len(self._transports)
        positions = [(first + step) % len(self._transports) for step in range(len(self._transports))]
        now = self._clock()
        return sorted(positions, key=lambda position: self._rests_until[position] > now)

    def _rest(self, position: int, error: errors.Unavailable, *, last: bool) -> None:
        """Returns if the next one may be asked."""
        self._rests_until[position] = self._clock() + REST_S
        if last or (isinstance(error, errors.ConnectionFailed) and error.sent):
            raise error


def _keep_alive_options() -> list[tuple[int, int, int]]:
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS names them differently
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Split at b"\\n" only; blank lines are skipped.

    httpx's own `aiter_lines` also splits at U+2028 and other characters that JSON leaves unescaped inside a string. Parts are
    joined once per line: a line of many megabytes costs no more than its length.
    """
    parts: list[bytes] = []
    async for chunk in chunks:
        head, *tails = chunk.split(b"\n")
        parts.append(head)
        for tail in tails:
            if line := b"".join(parts).strip():
                yield line
            parts = [tail]
    if line := b"".join(parts).strip():
        yield line


def _decode(line: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(line)
    except ValueError as error:
        raise errors.ProtocolError(f"a line of the answer is not a result: {error}: {line[:200]!r}", retryable=True) from error


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> errors.ExecError:
    """The error for an answer that is not 200. Anything may stand between us and the service, so any body is possible."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except ValueError:
        problem = Problem(code="unknown", title=body[:200].decode(errors="replace"), status=status)
    message = f"{status} {problem.code}: {problem.detail or problem.title}"
    if status == 408:
        return errors.ConnectionFailed(message, sent=False)  # it took too long to send, so nothing of it was accepted
    if status == 429:
        return errors.Overloaded(message, retry_after_s=_retry_after_s(problem, headers))
    if status == 410:
        return errors.SessionLost(message)
    if status == 503:
        return errors.NotReady(message, retry_after_s=_retry_after_s(problem, headers))
    if status >= 500:
        return errors.ServiceFailed(message, status=status)
    if status < 400:
        return errors.ProtocolError(f"unexpected status {status}; is this the address of the service?")
    kind = errors.Conflict if problem.code == "idempotency_conflict" else CALLER_ERRORS.get(status, errors.CallerError)
    return kind(message, code=problem.code, field=problem.field, status=status, request_id=problem.request_id)


def _retry_after_s(problem: Problem, headers: Mapping[str, str]) -> float | None:
    if problem.retry_after_s is not None:
        return max(0.0, problem.retry_after_s)
    text = headers.get("retry-after", "")
    # Seconds only. The other form is a date, and no two hosts' clocks are compared.
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
