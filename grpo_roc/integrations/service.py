"""Shared by the adapters: one client per event loop, tool calls, verification."""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from exec_client import DEFAULT_URL, AsyncClient, Client, Limits, Result, Unavailable
from grpo_roc.chat import Observation, ParseFailure, ToolCall, escape_tags

T = TypeVar("T")
MAX_CHARS = 2000
TOOL = "python_code_with_standard_io"
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = weakref.WeakKeyDictionary()
_blocking: Client | None = None


def url() -> str:
    return os.environ.get("EXEC_URL", DEFAULT_URL)


def client() -> AsyncClient:
    """The client of the running event loop; frameworks run several loops, and a client belongs to one."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = AsyncClient(url())
    return _clients[loop]


def blocking_client() -> Client:
    """One client for all threads, for frameworks that call tools in threads."""
    global _blocking
    if _blocking is None:
        _blocking = Client(url())
    return _blocking


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine for a framework that is not asynchronous, on one event loop for the whole process."""
    return asyncio.run_coroutine_threadsafe(coroutine, _background_loop()).result()


@functools.cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="exec-service", daemon=True).start()
    return loop


async def run(code: str, stdin: str = "", *, wall_s: float = 10.0) -> Observation:
    try:
        return _observe(await client().run(code, stdin=stdin, echo_value=True, limits=Limits(wall_s=wall_s)))
    except Unavailable as error:
        return _unavailable(error)


async def tool(code: str, input: str = "") -> str:
    """Execute a Python program and return what it prints.

    Args:
        code: The program.
        input: Its standard input.
    """
    return escape_tags((await run(code, input)).text)


def run_blocking(code: str, stdin: str = "", *, wall_s: float = 10.0) -> Observation:
    try:
        return _observe(blocking_client().run(code, stdin=stdin, echo_value=True, limits=Limits(wall_s=wall_s)))
    except Unavailable as error:
        return _unavailable(error)


def _observe(result: Result) -> Observation:
    return Observation(result.tool_text(MAX_CHARS), "ok" if result.ok else "error", result.status)


def _unavailable(error: Unavailable) -> Observation:
    return Observation("The tool could not be reached. This is not the program's fault.", "infra", type(error).__name__)


async def run_calls(calls: Sequence[ToolCall | ParseFailure]) -> list[Observation]:
    """Run the calls of a turn concurrently; a call that could not be parsed is an error."""

    async def one(call: ToolCall | ParseFailure) -> Observation:
        return call.observation() if isinstance(call, ParseFailure) else await run(call.code, call.stdin)

    return list(await asyncio.gather(*map(one, calls)))


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of chat text, whose special tokens are written out."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def verify(answer: str, truth: str, *, kind: str = "math") -> float | None:
    """1 or 0; None if the service could not tell."""
    try:
        equal = (await client().verify(answer, truth, kind=kind)).equal
    except Unavailable:
        return None
    return None if equal is None else float(equal)
