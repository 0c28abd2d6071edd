"""A silent stream shows that it lives: proxies cut one on which nothing comes for a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

KEEP_ALIVE_S = 15.0

T = TypeVar("T")


async def or_sign_of_life(wait: Callable[[], Awaitable[T]], sign: Callable[[], Awaitable[None]]) -> T:
    """What `wait` gives, which is begun anew after each `sign` that is written meanwhile."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await wait()
        except TimeoutError:
            await sign()
