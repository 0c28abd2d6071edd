"""Sessions of one worker in the real sandbox, without a queue or a gateway."""

from __future__ import annotations

import base64
import os
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sandbox_harness import Lab, laboratory

from exec_wire import Limits, Result
from exec_wire.messages.sessions import (
    Cell,
    Create,
    Did,
    End,
    FetchFiles,
    Fork,
    ForkSession,
    Got,
    Interrupt,
    Look,
    Order,
    PutFiles,
    Ran,
    Refused,
    Reply,
    RollBack,
    RunCell,
    SessionInfo,
    SessionSpec,
    Told,
)
from worker.session import Session
from worker.sessions import Sessions

_LIMITS = set(Limits.__struct_fields__)


class SessionLab(Lab):
    def __init__(self, lab: Lab, sessions: Sessions) -> None:
        super().__init__(lab.pool)
        self.sessions = sessions

    async def ask(self, order: Order, patience_s: float = 120.0) -> Reply:
        return await self.sessions.handle(order, patience_s)

    async def ask_create(self, **fields: Any) -> Reply:
        limits = {"wall_s": 5.0, "memory_mb": 256, "file_mb": 64} | {name: fields.pop(name) for name in _LIMITS & fields.keys()}
        return await self.ask(Create(SessionSpec(limits=Limits(**limits), **fields)))

    async def create(self, **fields: Any) -> Handle:
        reply = await self.ask_create(**fields)
        assert isinstance(reply, Told), reply
        return Handle(self, reply.sessions[0].id, fields.get("tenant", ""))

    @property
    def own_fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class Handle:
    """One session."""

    def __init__(self, lab: SessionLab, id: str, tenant: str = "") -> None:
        self.lab, self.id, self.tenant = lab, id, tenant

    @property
    def session(self) -> Session:
        return self.lab.sessions._sessions[self.id]

    async def ask_run(self, code: str, **fields: Any) -> Reply:
        fields.setdefault("tenant", self.tenant)
        return await self.lab.ask(RunCell(self.id, Cell(textwrap.dedent(code), **fields)))

    async def run(self, code: str, **fields: Any) -> Result:
        reply = await self.ask_run(code, **fields)
        assert isinstance(reply, Ran), reply
        return reply.result

    async def ok(self, code: str, **fields: Any) -> Result:
        result = await self.run(code, **fields)
        assert result.status == "ok", (result.status, result.error, result.stderr)
        return result

    async def refused(self, code: str, **fields: Any) -> Refused:
        reply = await self.ask_run(code, **fields)
        assert isinstance(reply, Refused), reply
        return reply

    async def fork(self, n: int = 1) -> list[Handle]:
        reply = await self.lab.ask(ForkSession(self.id, Fork(n, tenant=self.tenant)))
        assert isinstance(reply, Told), reply
        return [Handle(self.lab, info.id, self.tenant) for info in reply.sessions]

    async def not_forkable(self) -> Refused:
        reply = await self.lab.ask(ForkSession(self.id, Fork(1, tenant=self.tenant)))
        assert isinstance(reply, Refused), reply
        return reply

    async def roll_back(self) -> Reply:
        return await self.lab.ask(RollBack(self.id, self.tenant))

    async def interrupt(self) -> bool:
        reply = await self.lab.ask(Interrupt(self.id, self.tenant))
        assert isinstance(reply, Did), reply
        return reply.done

    async def look(self) -> SessionInfo:
        reply = await self.lab.ask(Look(self.id, self.tenant))
        assert isinstance(reply, Told), reply
        return reply.sessions[0]

    async def put(self, files: dict[str, bytes]) -> None:
        packed = {path: base64.b64encode(content).decode() for path, content in files.items()}
        reply = await self.lab.ask(PutFiles(self.id, packed, self.tenant))
        assert isinstance(reply, Got), reply

    async def fetch(self, *paths: str) -> dict[str, bytes]:
        reply = await self.lab.ask(FetchFiles(self.id, list(paths), self.tenant))
        assert isinstance(reply, Got), reply
        return {path: base64.b64decode(content) for path, content in reply.files.items()}

    async def delete(self) -> None:
        assert await self.lab.ask(End(self.id, self.tenant)) == Did(True)


@asynccontextmanager
async def session_laboratory(
    profiles: tuple[str, ...] = ("bare",), slots: int = 2, **settings: Any
) -> AsyncIterator[SessionLab]:
    async with laboratory(profiles, slots, **settings) as lab, Sessions("lab", lab.pool) as sessions:
        yield SessionLab(lab, sessions)
