"""Sessions by the names that their users give them, for services whose clients choose the ids of their sessions.

The name is a tag of the session, so every gateway finds it with the worker that has it. What a gateway remembers of ids is a
hint that spares the search: if it is wrong, the worker says so.
"""

from __future__ import annotations

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

HINTS = 10_000
DEAD = ("no_such_session", "session_ended", "session_lost")


class Ran(NamedTuple):
    result: Result
    anew: bool  # in a session that was not there before, or is not there any more


class Notebooks:
    """Those of one kind of client, which `kind` names."""

    def __init__(self, kind: str, sessions: SessionRouter) -> None:
        self._kind, self._sessions = kind, sessions
        self._hints: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._opening: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def run(self, name: str, cell: Cell, spec: SessionSpec, origin: Origin) -> Ran:
        """In the session of this name, which is made of `spec` if there is none or it has ended. Never twice."""
        id, anew = await self._open(name, spec, origin)
        try:
            result = await self._sessions.run(id, cell, origin)
        except Refusal as refused:
            if refused.code not in DEAD:
                raise
            await self._bury(name, id, spec.tenant, origin)
            id, anew = await self._open(name, spec, origin)
            result = await self._sessions.run(id, cell, origin)
        if result.status == "session_lost":
            self._forget(name, id, spec.tenant, origin)
        return Ran(result, anew or result.state_kept is False)

    async def all(self, tenant: str, origin: Origin) -> list[SessionInfo]:
        return (await self._sessions.list(Selection(group=self._kind, tenant=tenant), origin)).sessions

    async def end(self, name: str, tenant: str, origin: Origin) -> bool:
        """Was there one?"""
        found = await self._find(name, tenant, origin)
        ended = [await self._bury(name, session.id, tenant, origin) for session in found]
        return any(ended)

    async def _bury(self, name: str, id: str, tenant: str, origin: Origin) -> bool:
        self._forget(name, id, tenant, origin)
        try:
            await self._sessions.end(id, Tenant(tenant), origin)
        except Refusal as refused:
            if refused.code not in DEAD:
                raise
            return False
        return True

    async def _open(self, name: str, spec: SessionSpec, origin: Origin) -> tuple[str, bool]:
        """Its id, and whether it was made just now."""
        key = (_tenant(spec.tenant, origin), name)
        async with self._opening.setdefault(key, asyncio.Lock()):
            if (hint := self._hints.get(key)) is not None:
                self._hints.move_to_end(key)
                return hint, False
            found = [session for session in await self._find(name, spec.tenant, origin) if session.state != "ended"]
            session = found[0] if found else await self._create(name, spec, origin)
            self._hints[key] = session.id
            if len(self._hints) > HINTS:
                self._hints.popitem(last=False)
            return session.id, not found

    async def _find(self, name: str, tenant: str, origin: Origin) -> list[SessionInfo]:
        return (await self._sessions.list(Selection(group=self._kind, rollout=name, tenant=tenant), origin)).sessions

    async def _create(self, name: str, spec: SessionSpec, origin: Origin) -> SessionInfo:
        tags = Tags(group=self._kind, rollout=name, step=int(time.time()))
        made = SessionSpec(spec.profile, spec.limits, spec.ttl_s, tags, spec.tenant)
        return await self._sessions.create(made, origin)

    def _forget(self, name: str, id: str, tenant: str, origin: Origin) -> None:
        """Unless another one has taken its place."""
        key = (_tenant(tenant, origin), name)
        if self._hints.get(key) == id:
            del self._hints[key]


def created_at(session: SessionInfo) -> float:
    """Seconds since 1970; the tag `step` says it."""
    return float(session.tags.step or 0)


def _tenant(tenant: str, origin: Origin) -> str:
    return origin.account.tenant if origin.account is not None else tenant
