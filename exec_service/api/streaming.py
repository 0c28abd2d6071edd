"""Answers that take long: signs of life on a silent stream, and the end of the work when the caller disconnects."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Scope

from exec_wire.supervisor import stop

KEEP_ALIVE_S = 15.0  # proxies close a stream that is silent for a minute

T = TypeVar("T")


class ClientGone(Exception):
    """The caller disconnected: there is nobody to answer."""


@contextmanager
def on_disconnect(act: Callable[[], object], scope: Scope) -> Iterator[None]:
    """Call `act` as soon as the caller's connection is gone, if that happens within the block."""
    connection = scope["exec.connection"]  # a `BoundedProtocol`
    connection.on_lost = act
    connection.flow.resume_reading()  # else the end of a connection whose body was large is not seen
    if connection.transport.is_closing():
        act()
    try:
        yield
    finally:
        connection.on_lost = None


async def cancel_on_disconnect(work: Coroutine[Any, Any, T], scope: Scope) -> T:
    """The result of `work`. Cancels it and raises `ClientGone` as soon as the caller's connection is gone."""
    working, cancelled = asyncio.create_task(work), list[bool]()
    try:
        with on_disconnect(lambda: cancelled.append(working.cancel()), scope):
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
