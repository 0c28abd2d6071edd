"""Results that are ready together leave in one write, in several when they are much; a silent stream shows that it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from exec_wire.messages import Result

WRITE_BYTES = 256 << 10  # a portion is written when it has reached this size
KEEP_ALIVE_S = 15.0  # proxies end a stream on which nothing comes for a minute

T = TypeVar("T")


def portions(results: list[Result]) -> list[list[Result]]:
    if len(results) == 1 or sum(map(_size, results)) <= WRITE_BYTES:
        return [results]
    half = len(results) // 2
    return portions(results[:half]) + portions(results[half:])


def _size(result: Result) -> int:
    return len(result.stdout) + len(result.stderr) + sum(map(len, result.files.values()))


async def or_sign_of_life(wait: Callable[[], Awaitable[T]], sign: Callable[[], Awaitable[None]]) -> T:
    """What `wait` gives, which is begun anew after each `sign` that is written meanwhile."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await wait()
        except TimeoutError:
            await sign()
