"""Sessions: state that lasts between cells, copies of it, and the way back.

A cell is sent again, with the same key, when the connection broke: the worker that has the session answers with what became of
it the first time. Nothing is remembered here, unless a session is to be rebuilt: then its cells are, and are run again in a new
one when the old one was lost.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote
from uuid import uuid4

import msgspec

from exec_client._calls import encoded_files, make
from exec_client._retry import Policy, send_until_answered
from exec_client._transport import Transport
from exec_client.errors import CallerError, InfraFailure, SessionLost, UsageError
from exec_wire import Limits, Priority, Result, Tags
from exec_wire.messages import sessions as wire
from exec_wire.messages.unknown_fields import Reader

ASK_S = 30.0
PATH = "/v1/sessions"

T = TypeVar("T")
SPEC, _CELL = Reader(wire.SessionSpec), Reader(wire.Cell)


class SessionFields(TypedDict, total=False):
    """The fields of `exec_wire.messages.sessions.SessionSpec` as keywords of `session`."""

    profile: str
    limits: Limits
    ttl_s: float
    tags: Tags
    tenant: str
    auto_checkpoint: bool
    env: dict[str, str]
    files: Mapping[str, str | bytes]
    priority: Priority


class CellFields(TypedDict, total=False):
    """The fields of `exec_wire.messages.sessions.Cell` as keywords of `run`."""

    id: str
    stdin: str
    wall_s: float
    deadline_s: float
    idempotency_key: str


class AsyncSession:
    """A Python session in a sandbox. Made by `AsyncClient.session`.

        async with client.session() as session:
            await session.run("x = 20")
            one, two = await session.fork(2)
            await one.run("x += 1")
            [(await each.run("x")).value for each in (one, two)]  # ['21', '20']

    `run` gives a `Result` for everything that the cell did. `SessionLost` is raised when the worker that had the session is
    gone, unless `rebuild` was asked for.
    """

    def __init__(
        self, transport: Transport, policy: Policy, spec: wire.SessionSpec, rebuild: bool, history: Iterable[_Step] = ()
    ) -> None:
        self._transport, self._policy, self._spec, self._rebuild = transport, policy, spec, rebuild
        self._history = list(history)
        self._id = ""

    @property
    def id(self) -> str:
        if not self._id:
            raise UsageError("the session is not started: use `async with client.session() as session`, or await start()")
        return self._id

    async def start(self) -> Self:
        if not self._id:
            create = partial(self._transport.ask, "POST", PATH, wire.SessionInfo, ASK_S, body=self._spec)
            self._id = (await send_until_answered(lambda _: create(), self._policy, ASK_S)).id
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, **fields: Unpack[CellFields]) -> Result:
        """Run a cell. Cancelling the task that awaits this does not stop the cell; `interrupt` does."""
        cell = make(_CELL, (code,), {"tenant": self._spec.tenant, **fields})[0]
        result = await self._with_rebuild(lambda session: session._run(cell))
        if self._rebuild and result.state_kept:
            self._history.append(lambda session: session._run(cell))
        return result

    async def fork(self, n: int = 1, *, tags: Tags | None = None) -> list[AsyncSession]:
        """Copies of this session as it is now; each is ended by itself (`close`, or `async with`).

        `Conflict` with the code `not_forkable` if it has threads or child processes.
        """
        body = wire.Fork(n, tags, self._spec.tenant)
        made = await self._with_rebuild(lambda session: session._ask("POST", "/fork", wire.SessionList, body=body))
        return [self._sibling(info.id) for info in made.sessions]

    async def rollback(self) -> bool:
        """Return to before the last cell, of a session with `auto_checkpoint`; were its files restored too?"""
        info = await self._ask("POST", "/rollback", wire.SessionInfo, body=wire.Tenant(self._spec.tenant))
        if self._rebuild and self._history:
            self._history.pop()
        return bool(info.files_restored)

    async def interrupt(self) -> bool:
        """Stop the cell that runs, with a KeyboardInterrupt; was there one?"""
        answer = await self._ask("POST", "/interrupt", wire.Interrupted, body=wire.Tenant(self._spec.tenant))
        return answer.interrupted

    async def put_files(self, files: Mapping[str, str | bytes]) -> None:
        """Write files; str contents are base64 as on the wire. Relative paths are seen from the session's folder."""
        body = wire.Files(encoded_files(files), self._spec.tenant)
        await self._with_rebuild(lambda session: session._put(body))
        if self._rebuild:
            self._history.append(lambda session: session._put(body))

    async def fetch_files(self, paths: Iterable[str]) -> dict[str, bytes]:
        """The contents of those that are there."""
        query = {"path": list(paths), "tenant": self._spec.tenant}
        got = await self._with_rebuild(lambda session: session._ask("GET", "/files", wire.Files, query=query))
        return {path: base64.b64decode(content) for path, content in got.files.items()}

    async def info(self) -> wire.SessionInfo:
        return await self._ask("GET", "", wire.SessionInfo, query={"tenant": self._spec.tenant})

    async def close(self) -> None:
        """End it. One that is gone already is no error."""
        if not self._id:
            return
        path, self._id = self._path, ""
        try:
            await self._transport.ask("DELETE", path, wire.Ended, ASK_S, {"tenant": self._spec.tenant})
        except SessionLost:
            pass
        except CallerError as error:
            if error.code != "no_such_session":
                raise

    # -- asking ---------------------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> str:
        return f"{PATH}/{quote(self.id, safe='')}"

    def _sibling(self, id: str) -> AsyncSession:
        other = AsyncSession(self._transport, self._policy, self._spec, self._rebuild, self._history)
        other._id = id
        return other

    async def _run(self, cell: wire.Cell) -> Result:
        if not cell.idempotency_key:
            cell = msgspec.structs.replace(cell, idempotency_key=uuid4().hex)
        ask = partial(self._ask, "POST", "/run", Result, cell.deadline_s + ASK_S, body=cell)
        result = await send_until_answered(lambda _: ask(), self._policy, cell.deadline_s)
        if result.status == "session_lost":
            raise SessionLost(result.error, result=result)
        if result.blame == "infra":
            raise InfraFailure.of(result)
        return result

    async def _put(self, body: wire.Files) -> wire.Files:
        return await self._ask("PUT", "/files", wire.Files, body=body)

    async def _ask(
        self, verb: str, path: str, answer: type[T], timeout_s: float = ASK_S, query: Any = None, body: Any = None
    ) -> T:
        return await self._transport.ask(verb, self._path + path, answer, timeout_s, query, body)

    async def _with_rebuild(self, ask: Callable[[AsyncSession], Awaitable[T]]) -> T:
        try:
            return await ask(self)
        except SessionLost:
            if not self._rebuild:
                raise
        self._id = ""
        await self.start()
        for step in self._history:
            await step(self)
        return await ask(self)


_Step = Callable[[AsyncSession], Awaitable[object]]  # something that changed a session and can be done again
