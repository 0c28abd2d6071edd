"""Sessions of one worker in the real sandbox, without a queue or a gateway."""

from __future__ import annotations

import base64
import os
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sandbox_harness import Lab, laboratory

from exec_wire import Limits, Result
from exec_wire.messages import sessions as wire
from worker.sessions import Session, Sessions

T = TypeVar("T")
_LIMITS = set(Limits.__struct_fields__)


class SessionLab(Lab):
    def __init__(self, lab: Lab, sessions: Sessions) -> None:
        super().__init__(lab.pool)
        self.sessions = sessions

    async def ask(self, order: wire.Order, patience_s: float = 120.0) -> wire.Reply:
        return await self.sessions.handle(order, patience_s)

    async def expect(self, kind: type[T], order: wire.Order) -> T:
        reply = await self.ask(order)
        assert isinstance(reply, kind), reply
        return reply

    async def ask_create(self, **fields: Any) -> wire.Reply:
        limits = {"wall_s": 5.0, "memory_mb": 256, "file_mb": 64} | {name: fields.pop(name) for name in _LIMITS & fields.keys()}
        return await self.ask(wire.Create(wire.SessionSpec(limits=Limits(**limits), **fields)))

    async def create(self, **fields: Any) -> Handle:
        reply = await self.ask_create(**fields)
        assert isinstance(reply, wire.Told), reply
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

    async def ask_run(self, code: str, **fields: Any) -> wire.Reply:
        fields.setdefault("tenant", self.tenant)
        return await self.lab.ask(wire.RunCell(self.id, wire.Cell(textwrap.dedent(code), **fields)))

    async def run(self, code: str, **fields: Any) -> Result:
        reply = await self.ask_run(code, **fields)
        assert isinstance(reply, wire.Ran), reply
        return reply.result

    async def ok(self, code: str, **fields: Any) -> Result:
        result = await self.run(code, **fields)
        assert result.status == "ok", (result.status, result.error, result.stderr)
        return result

    async def refused(self, code: str, **fields: Any) -> wire.Refused:
        reply = await self.ask_run(code, **fields)
        assert isinstance(reply, wire.Refused), reply
        return reply

    async def fork(self, n: int = 1) -> list[Handle]:
        reply = await self.lab.expect(wire.Told, wire.ForkSession(self.id, wire.Fork(n, tenant=self.tenant)))
        return [Handle(self.lab, info.id, self.tenant) for info in reply.sessions]

    async def not_forkable(self) -> wire.Refused:
        return await self.lab.expect(wire.Refused, wire.ForkSession(self.id, wire.Fork(1, tenant=self.tenant)))

    async def roll_back(self) -> wire.Reply:
        return await self.lab.ask(wire.RollBack(self.id, self.tenant))

    async def interrupt(self) -> bool:
        return (await self.lab.expect(wire.Did, wire.Interrupt(self.id, self.tenant))).done

    async def look(self) -> wire.SessionInfo:
        return (await self.lab.expect(wire.Told, wire.Look(self.id, self.tenant))).sessions[0]

    async def put(self, files: dict[str, bytes]) -> None:
        packed = {path: base64.b64encode(content).decode() for path, content in files.items()}
        await self.lab.expect(wire.Got, wire.PutFiles(self.id, packed, self.tenant))

    async def fetch(self, *paths: str) -> dict[str, bytes]:
        reply = await self.lab.expect(wire.Got, wire.FetchFiles(self.id, list(paths), self.tenant))
        return {path: base64.b64decode(content) for path, content in reply.files.items()}

    async def delete(self) -> None:
        assert await self.lab.ask(wire.End(self.id, self.tenant)) == wire.Did(True)


@asynccontextmanager
async def session_laboratory(
    profiles: tuple[str, ...] = ("bare",), slots: int = 2, **settings: Any
) -> AsyncIterator[SessionLab]:
    async with laboratory(profiles, slots, **settings) as lab, Sessions("lab", lab.pool) as sessions:
        yield SessionLab(lab, sessions)
