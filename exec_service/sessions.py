"""Sessions at a gateway: finds the worker of a session by its id, and passes requests and replies.

A gateway keeps no state of a session, so every gateway serves every session, and losing a gateway affects no session.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from exec_service.config import GatewayConfig
from exec_service.dispatch.dispatch import Dispatch
from exec_service.dispatch.requests import ANONYMOUS, Origin
from exec_service.dispatch.workers import WorkerRegistry
from exec_service.refusals import NotPermitted, Refusal
from exec_service.telemetry.metrics import NO_TAGS, Metrics
from exec_wire.messages import sessions as wire
from exec_wire.messages.calls import Result, Selection, verdict
from exec_wire.messages.sessions import SessionInfo, SessionList
from exec_wire.queue.protocol import GatewayQueue, Job, QueueUnavailable, WorkerInfo

LOOK_S = 0.5  # between two checks that the worker of a pending request is alive
ANSWER_S = 30.0  # for everything but cells
WORKER_NEEDS_S = 6.0  # beyond a cell's deadline: interrupt, kill, reply

R = TypeVar("R")
M = TypeVar("M", bound=Struct)


@contextmanager
def permitted(at: str) -> Iterator[None]:
    """Give a `NotPermitted` the path of the field: below `at`, or if that is empty the name of a query's parameter."""
    try:
        yield
    except NotPermitted as refusal:
        refusal.field = (at + refusal.inside).removeprefix(".")
        raise


def own(message: M, origin: Origin) -> M:
    """With keys: the message as one of the key's tenant. Refuses a message that names another tenant."""
    if origin.account is None:
        return message
    with permitted("$"):
        origin.account.check_tenant(getattr(message, "tenant"))  # noqa: B009 - every message here has one
    return origin.account.own(message)


def with_warnings(answer: M, warnings: dict[int, list[str]]) -> M:
    return replace(answer, warnings=warnings[0]) if warnings else answer


class SessionLost(Exception):
    """The worker is gone, or did not reply."""


class SessionRouter:
    def __init__(
        self, config: GatewayConfig, queue: GatewayQueue, worker_registry: WorkerRegistry, dispatch: Dispatch, metrics: Metrics
    ) -> None:
        self._config, self._queue, self._worker_registry = config, queue, worker_registry
        self._dispatch, self._metrics = dispatch, metrics
        self._ids = (f"s{prefix}-{number:x}" for prefix in [secrets.token_hex(6)] for number in itertools.count())

    async def create(self, spec: wire.SessionSpec, origin: Origin = ANONYMOUS) -> SessionInfo:
        """On the worker with the lowest share of sessions in use; on the next one if that refuses."""
        spec = own(spec, origin)
        if origin.account is not None:
            if origin.adapter:  # clients of an adapter cannot know what the key allows
                spec = replace(spec, limits=origin.account.lowered_limits(spec.limits))
            with permitted("$"):
                origin.account.check_limits(spec.limits)
        self._dispatch.check_open()
        if not self._worker_registry.alive:
            raise Refusal("not_ready", "no live worker", retry_after_s=self._config.retry_after_max_s)
        refusal = Refusal("too_many_sessions", "no worker has room for another session", retry_after_s=5.0)
        for worker in self._by_room(spec.profile):
            try:
                return (await self._ask(worker.id, wire.Create(spec), wire.Told, ANSWER_S)).sessions[0]
            except SessionLost:
                continue
            except Refusal as refused:
                if refused.code != "too_many_sessions":
                    raise
                refusal = refused
        raise refusal

    def _by_room(self, profile: str) -> list[WorkerInfo]:
        with_room = (worker for worker in self._worker_registry.workers if worker.max_sessions)
        fit = (worker for worker in with_room if not profile or profile in worker.profiles)
        return sorted(fit, key=lambda worker: worker.sessions / worker.max_sessions)

    async def run(self, id: str, cell: wire.Cell, origin: Origin = ANONYMOUS) -> Result:
        """The result of the cell; `session_lost` if the worker does not reply."""
        accepted = time.monotonic()
        cell = own(cell, origin)
        if origin.account is not None and (wall_s := cell.wall_s) is not None:
            if origin.adapter:
                wall_s = min(wall_s, origin.account.allowance.max_limits.get("wall_s", wall_s))
                cell = replace(cell, wall_s=wall_s)
            with permitted("$"):
                origin.account.check_limit("wall_s", wall_s, ".wall_s")
        try:
            order = wire.RunCell(id, cell, self._dispatch.waiting.weight_of(cell.tenant))
            ran = await self.ask(id, order, wire.Ran, cell.deadline_s)
            result, tags = ran.result, ran.tags
        except Refusal as refused:
            if refused.code != "session_lost":
                raise
            result, tags = verdict("session_lost", error=refused.detail, state_kept=False, id=cell.id), NO_TAGS
        total_ms = (time.monotonic() - accepted) * 1000
        result.timings.total_ms = round(total_ms, 3)
        result.timings.queue_ms = round(max(0.0, total_ms - result.timings.run_ms), 3)
        result.request_id, result.traceparent = origin.request_id, origin.traceparent
        self._metrics.finished(result, origin.adapter, cell.tenant, tags)
        return result

    async def fork(self, id: str, fork: wire.Fork, origin: Origin) -> SessionList:
        return SessionList((await self.ask(id, wire.ForkSession(id, own(fork, origin)), wire.Told)).sessions)

    async def look(self, id: str, tenant: wire.Tenant, origin: Origin) -> SessionInfo:
        return (await self.ask(id, wire.Look(id, own(tenant, origin).tenant), wire.Told)).sessions[0]

    async def roll_back(self, id: str, tenant: wire.Tenant, origin: Origin) -> SessionInfo:
        return (await self.ask(id, wire.RollBack(id, own(tenant, origin).tenant), wire.Told)).sessions[0]

    async def interrupt(self, id: str, tenant: wire.Tenant, origin: Origin) -> wire.Interrupted:
        return wire.Interrupted((await self.ask(id, wire.Interrupt(id, own(tenant, origin).tenant), wire.Did)).done)

    async def end(self, id: str, tenant: wire.Tenant, origin: Origin) -> wire.Ended:
        return wire.Ended((await self.ask(id, wire.End(id, own(tenant, origin).tenant), wire.Did)).done)

    async def put(self, id: str, files: wire.Files, origin: Origin) -> wire.Files:
        return wire.Files((await self.ask(id, wire.PutFiles(id, files.files, own(files, origin).tenant), wire.Got)).files)

    async def fetch(self, id: str, wanted: wire.Fetch, origin: Origin) -> wire.Files:
        got = await self.ask(id, wire.FetchFiles(id, wanted.paths, own(wanted, origin).tenant), wire.Got)
        return wire.Files(got.files, files_missing=got.files_missing)

    async def list(self, selection: Selection, origin: Origin) -> SessionList:
        if selection.request is not UNSET or selection.index:
            raise Refusal("bad_query", "select sessions by their tags; request and index select calls", field="request")
        selection = own(selection, origin)
        order, workers = wire.ListSessions(selection), self._worker_registry.workers
        asked = [self._ask(worker.id, order, wire.Told, ANSWER_S) for worker in workers]
        told = await asyncio.gather(*asked, return_exceptions=True)
        return SessionList([session for answer in told if isinstance(answer, wire.Told) for session in answer.sessions])

    async def ask(self, id: str, order: wire.Order, kind: type[R], deadline_s: float = ANSWER_S) -> R:
        """The reply of the session's worker. Raises a `Refusal` if the worker refuses, or is gone."""
        parts = wire.read_session_id(id)
        if parts is None:
            raise Refusal("no_such_session", "this is not the id of a session")
        try:
            return await self._ask(parts.worker, order, kind, deadline_s, pin=id)
        except SessionLost:
            raise Refusal("session_lost", "the worker of the session is gone or does not reply") from None

    async def _ask(self, worker: str, order: wire.Order, kind: type[R], deadline_s: float, pin: str = "") -> R:
        """`pin`: the id of the session, whose jobs all go the same way."""
        if not self._worker_registry.has(worker):
            raise SessionLost
        id = next(self._ids)
        with self._dispatch.asking(id) as answer:
            job = Job(id, wire.pack_sessions(order), round(deadline_s * 1000), self._queue.name)
            try:
                await self._queue.publish_to(worker, job, pin)
            except QueueUnavailable as unavailable:
                if not unavailable.sent:  # else the worker may have it and reply
                    raise Refusal("not_ready", str(unavailable), retry_after_s=self._config.retry_after_max_s) from None
            give_up = time.monotonic() + deadline_s + WORKER_NEEDS_S
            while not answer.done():
                if time.monotonic() > give_up or not self._worker_registry.has(worker):
                    raise SessionLost
                await asyncio.wait({answer}, timeout=LOOK_S)
            return _read(answer.result().payload, kind)


def _read(payload: bytes, kind: type[R]) -> R:
    try:
        reply: wire.Reply = wire.unpack_reply(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Refusal("internal", "the worker's reply could not be read") from None
    if isinstance(reply, wire.Refused):
        raise Refusal(reply.code, reply.detail, field=reply.field, retry_after_s=reply.retry_after_s)
    if not isinstance(reply, kind):
        raise Refusal("internal", "the worker sent another kind of reply")
    return reply
