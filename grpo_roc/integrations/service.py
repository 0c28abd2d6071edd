"""What all adapters share: one client per event loop, a tool call, a verification, and which outcomes are the model's."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import NamedTuple

from exec_client import AsyncClient, Client, Limits, Result, Unavailable
from exec_client.transport import DEFAULT_URL

MAX_CHARS = 2000
TOOL = "python_code_with_standard_io"
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = weakref.WeakKeyDictionary()


def url() -> str:
    return os.environ.get("EXEC_URL", DEFAULT_URL)


def client() -> AsyncClient:
    """Of the running event loop; frameworks run several, and a client belongs to one."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncClient(url())
    return _clients[loop]


class Answer(NamedTuple):
    text: str  # for the model
    status: str
    outcome: str  # ok, error (the model's), infra: as `grpo_roc.roc` counts them


def of_result(result: Result) -> Answer:
    return Answer(result.tool_text(MAX_CHARS), result.status, "ok" if result.ok else "error")


def of_failure(error: Unavailable) -> Answer:
    return Answer("The tool could not be reached. This is not the program's fault.", type(error).__name__, "infra")


async def run(code: str, stdin: str = "", *, wall_s: float = 10.0) -> Answer:
    try:
        return of_result(await client().run(code, stdin=stdin, echo_value=True, limits=Limits(wall_s=wall_s)))
    except Unavailable as error:
        return of_failure(error)


async def run_many(programs: list[tuple[str, str]], *, wall_s: float = 10.0) -> list[Answer]:
    return list(await asyncio.gather(*(run(code, stdin, wall_s=wall_s) for code, stdin in programs)))


async def verify(answer: str, truth: str, *, kind: str = "math") -> float | None:
    """1 or 0; None if it is not known and the model is not to blame."""
    try:
        equal = (await client().verify(answer, truth, kind=kind)).equal
    except Unavailable:
        return None
    return None if equal is None else float(equal)


_blocking: Client | None = None


def blocking_client() -> Client:
    """For frameworks whose tools are called in threads; threads share it."""
    global _blocking
    if _blocking is None:
        _blocking = Client(url())
    return _blocking


def run_blocking(code: str, stdin: str = "", *, wall_s: float = 10.0) -> Answer:
    try:
        return of_result(blocking_client().run(code, stdin=stdin, echo_value=True, limits=Limits(wall_s=wall_s)))
    except Unavailable as error:
        return of_failure(error)
