"""Sessions by name, for services whose clients choose the ids of their sessions.

The name is a tag of the session, so every gateway finds the session at its worker. A gateway caches ids to skip the search; if
one is stale, the worker refuses it.
"""

import asyncio
import time
from collections import OrderedDict
from typing import NamedTuple
from weakref import WeakValueDictionary

from exec_service.dispatch.requests import Origin
from exec_service.refusals import Refusal
from exec_service.sessions import SessionRouter
from exec_wire.messages.calls import Result, Selection, Tags
from exec_wire.messages.sessions import Cell, SessionInfo, SessionSpec, Tenant

CACHED_IDS = 10_000
DEAD = ("no_such_session", "session_ended", "session_lost")


class Ran(NamedTuple):
    result: Result
    new: bool  # the session is new, or its state is lost


class Notebooks:
    """The named sessions of one kind of client."""

    def __init__(self, kind: str, sessions: SessionRouter) -> None:
        self._kind, self._sessions = kind, sessions
        self._ids: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._opening: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def run(self, name: str, cell: Cell, spec: SessionSpec, origin: Origin) -> Ran:
        """Run a cell once in the session of this name, which is created from `spec` if there is no live one."""
        id, new = await self._open(name, spec, origin)
        try:
            result = await self._sessions.run(id, cell, origin)
        except Refusal as refused:
            if refused.code not in DEAD:
                raise
            await self._end_session(name, id, spec.tenant, origin)
            id, new = await self._open(name, spec, origin)
            result = await self._sessions.run(id, cell, origin)
        if result.status == "session_lost":
            self._forget(name, id, spec.tenant, origin)
        return Ran(result, new or result.state_kept is False)

    async def all(self, tenant: str, origin: Origin) -> list[SessionInfo]:
        return (await self._sessions.list(Selection(group=self._kind, tenant=tenant), origin)).sessions

    async def end(self, name: str, tenant: str, origin: Origin) -> bool:
        """End the sessions of this name; whether there was one."""
        found = await self._find(name, tenant, origin)
        ended = [await self._end_session(name, session.id, tenant, origin) for session in found]
        return any(ended)

    async def _end_session(self, name: str, id: str, tenant: str, origin: Origin) -> bool:
        self._forget(name, id, tenant, origin)
        try:
            await self._sessions.end(id, Tenant(tenant), origin)
        except Refusal as refused:
            if refused.code not in DEAD:
                raise
            return False
        return True

    async def _open(self, name: str, spec: SessionSpec, origin: Origin) -> tuple[str, bool]:
        """The id of the session, and whether it is new."""
        key = (_tenant(spec.tenant, origin), name)
        async with self._opening.setdefault(key, asyncio.Lock()):
            if (cached := self._ids.get(key)) is not None:
                self._ids.move_to_end(key)
                return cached, False
            found = [session for session in await self._find(name, spec.tenant, origin) if session.state != "ended"]
            session = found[0] if found else await self._create(name, spec, origin)
            self._ids[key] = session.id
            if len(self._ids) > CACHED_IDS:
                self._ids.popitem(last=False)
            return session.id, not found

    async def _find(self, name: str, tenant: str, origin: Origin) -> list[SessionInfo]:
        return (await self._sessions.list(Selection(group=self._kind, rollout=name, tenant=tenant), origin)).sessions

    async def _create(self, name: str, spec: SessionSpec, origin: Origin) -> SessionInfo:
        tags = Tags(group=self._kind, rollout=name, step=int(time.time()))
        made = SessionSpec(spec.profile, spec.limits, spec.ttl_s, tags, spec.tenant)
        return await self._sessions.create(made, origin)

    def _forget(self, name: str, id: str, tenant: str, origin: Origin) -> None:
        """Drop the cached id, unless another session has replaced it."""
        key = (_tenant(tenant, origin), name)
        if self._ids.get(key) == id:
            del self._ids[key]


def created_at(session: SessionInfo) -> float:
    """Seconds since 1970, from the tag `step`."""
    return float(session.tags.step or 0)


def _tenant(tenant: str, origin: Origin) -> str:
    return origin.account.tenant if origin.account is not None else tenant
