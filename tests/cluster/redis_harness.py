"""A real server, or a reason why there is none; and time that passes there without waiting."""

from __future__ import annotations

import asyncio
import os

import pytest

from loadtest import moved_clock
from loadtest.redis_server import NoServer, find_server


def need_redis() -> None:
    """Without a server: skipped on a laptop, failed in CI."""
    try:
        find_server()
    except NoServer as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


class MovedServer(moved_clock.MovedServer):
    """Leases lapse and keys expire there when a test says so."""

    async def pass_s(self, seconds: float) -> None:
        self.clock.move(seconds)
        await asyncio.sleep(0.01)  # it looks at the clock `hz` times a second
