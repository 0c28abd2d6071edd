"""What all adapters share: how they submit calls, for which tenant, and how they refuse."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from exec_service.api.calls import Endpoint
from exec_service.api.errors import answer
from exec_service.api.middleware import RequestFacts
from exec_service.api.streaming import cancel_on_disconnect
from exec_service.api.validation import Validator, decode
from exec_service.config import AdapterName, GatewayConfig
from exec_service.dispatch.admission import Reservation
from exec_service.dispatch.call_group import CallGroup, raise_first
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import Origin
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.judging.judge import CALL_OVERHEAD_BYTES, describe_end
from exec_service.refusals import Overloaded, Refusal
from exec_service.sessions import SessionRouter
from exec_service.telemetry.metrics import Metrics
from exec_wire.messages.calls import Call, Limits, Result, encode_json
from exec_wire.supervisor import Supervisor, stop

T = TypeVar("T")

DEADLINE_MOST_S = 7200.0
CPU_S = 3600.0  # the foreign services limit wall time only


class GatewayParts(NamedTuple):
    """The parts of the gateway that adapters use."""

    config: GatewayConfig
    dispatch: Dispatch
    validator: Validator
    worker_registry: WorkerRegistry
    metrics: Metrics
    sessions: SessionRouter
    tasks: set[asyncio.Task[None]]  # cancelled when the gateway stops
    supervisor: Supervisor


WARM = "math"  # the profile of sessions of foreign clients, where a worker has it


class Adapter:
    """Submits the calls of one foreign service's clients. `tenant` is that of clients without a key, if they are accepted."""

    def __init__(self, name: AdapterName, parts: GatewayParts) -> None:
        keyless = parts.config.keyless_adapters.get(name)
        self.tenant = keyless.tenant if keyless else ""
        self._most = keyless.max_calls if keyless else 0
        self._inside = 0
        self._name, self._parts = name, parts

    def origin(self, facts: RequestFacts) -> Origin:
        return msgspec.structs.replace(facts.origin, adapter=self._name)

    @property
    def profile(self) -> str:
        return WARM if WARM in self._parts.worker_registry.profiles else ""

    @contextmanager
    def admitted(self, facts: RequestFacts, calls: int, bytes_: int) -> Iterator[Reservation]:
        """Admit the calls of one request, or raise a `Refusal`."""
        keyless = calls if facts.origin.account is None else 0  # callers with a key have the limits of that key instead
        if self._most and self._inside + keyless > self._most:
            raise Overloaded(f"{self._inside} of the {self._most} calls that {self._name} clients may have are in flight", 1.0)
        self._inside += keyless
        try:
            with self._parts.dispatch.reserve(calls, bytes_, facts.origin) as room:
                facts.calls = calls
                yield room
        finally:
            self._inside -= keyless

    @contextmanager
    def group(self, facts: RequestFacts, calls: int, bytes_: int) -> Iterator[CallGroup]:
        """The same. A call that fails with blame infra runs again within its deadline."""
        with self.admitted(facts, calls, bytes_) as room:
            yield CallGroup(self._parts.dispatch, room, self.origin(facts))

    async def run(self, call: Call, facts: RequestFacts) -> Result:
        with self.group(facts, 1, bytes_of(call)) as group:
            return await group.run(call)


class AdapterEndpoint(Endpoint):
    """A route that takes a `request` and answers as JSON; `_serve` translates."""

    request: ClassVar[type[msgspec.Struct]]
    statuses: ClassVar[dict[str, int]] = {"bad_json": 422}  # statuses that differ from the service's own, by problem code
    message_field: ClassVar[str] = ""  # the member of an error's body in which its clients look for the message

    def __init__(self, parts: GatewayParts, adapter: Adapter) -> None:
        super().__init__(parts.config, parts.dispatch, parts.validator)
        self._parts, self._adapter = parts, adapter
        self._decode = msgspec.json.Decoder(self.request).decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Refusal as refusal:
            status = self.statuses.get(refusal.code)
            response = answer(refusal, scope, self._parts.metrics, status=status, message_field=self.message_field)
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, facts: RequestFacts, receive: Receive, send: Send) -> None:
        request = decode(self._decode, await self._read(scope, facts, receive))
        made = await cancel_on_disconnect(self._serve(request, scope, facts), scope)
        await self._send_json(encode_json(made), send)

    async def _serve(self, request: Any, scope: Scope, facts: RequestFacts) -> msgspec.Struct:
        raise NotImplementedError


def get(path: str, answer_of: Any) -> Route:
    """A route that answers JSON and runs nothing."""

    async def endpoint(request: Request) -> Response:
        return Response(msgspec.json.encode(answer_of()), media_type="application/json")

    return Route(path, endpoint, methods=["GET"])


def post(path: str, endpoint: AdapterEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def limits(
    wall_s: float, memory_mb: int, *, output_bytes: int = 0, file_bytes: int = 0, max_output_kb: int = Limits().output_kb
) -> Limits:
    """`output_bytes` and `file_bytes` are added to the default limits."""
    usual = Limits()
    return Limits(
        wall_s=wall_s,
        cpu_s=CPU_S,
        memory_mb=min(max(memory_mb, 16), 1 << 16),
        output_kb=min(usual.output_kb + (output_bytes >> 10), max_output_kb),
        file_mb=min(usual.file_mb + (file_bytes >> 20), 1 << 16),
    )


def deadline(seconds: float) -> float:
    """The deadline of a call, within the maximum of `Call.deadline_s`."""
    return min(seconds, DEADLINE_MOST_S)


def bytes_of(call: Call) -> int:
    return len(call.code) + len(call.stdin) + sum(map(len, call.files.values())) + CALL_OVERHEAD_BYTES


def raise_if_infra(result: Result) -> Result:
    """The result. Raises a `Refusal` to try again if it failed with blame infra."""
    if result.blame == "infra" and result.retryable:
        raise Refusal("not_run", describe_end(result), retry_after_s=1.0)
    return result


async def in_order(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at the same time; return the results in order."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        raise_first(done)
        return [task.result() for task in tasks]
    finally:
        await stop(tasks)
