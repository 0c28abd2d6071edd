"""Answers that take long: signs of life on a silent stream, and the end of the work when the caller disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from exec_wire.supervisor import logged, stop

KEEP_ALIVE_S = 15.0  # proxies close a stream that is silent for a minute

T = TypeVar("T")


class ClientGone(Exception):
    """The caller disconnected: there is nobody to answer."""


@asynccontextmanager
async def on_disconnect(act: Callable[[], object], receive: Receive) -> AsyncIterator[None]:
    """Call `act` as soon as the caller's connection is gone, if that happens within the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        act()

    watcher = logged(asyncio.create_task(watch()), "the watch for the end of a connection failed")
    try:
        yield
    finally:
        watcher.cancel()


async def cancel_on_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`. Cancels it and raises `ClientGone` as soon as the caller's connection is gone."""
    working, cancelled = asyncio.create_task(work), list[bool]()
    try:
        async with on_disconnect(lambda: cancelled.append(working.cancel()), receive):
            await asyncio.wait({working})
    finally:
        await stop([working])
    if any(cancelled):
        raise ClientGone
    return working.result()


async def or_keep_alive(wait: Callable[[], Awaitable[T]], sign: Callable[[], Awaitable[None]]) -> T:
    """The result of `wait`, which is started again after each `sign` that a long silence causes."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await wait()
        except TimeoutError:
            await sign()
