"""A real server, or a reason why there is none; and time that passes there without waiting."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import pytest

from loadtest import moved_clock, redis_server
from loadtest.redis_server import NoServer, find_server


def need_redis() -> None:
    """Without a server: skipped on a laptop, failed in CI."""
    try:
        find_server()
    except NoServer as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@functools.cache
def server_params() -> list[Any]:
    """The paths of all servers, named by their versions such as `redis-7.0.15`; a name alone where there is none."""
    params = [pytest.param(path, id=_name(redis_server.version(path))) for path in redis_server.servers()]
    return params or [pytest.param("", id="no server")]


def _name(version: str) -> str:
    kind, _, number = version.partition(" server v=")
    return f"{kind.lower()}-{number}"


class MovedServer(moved_clock.MovedServer):
    """Leases lapse and keys expire there when a test says so."""

    async def pass_s(self, seconds: float) -> None:
        self.clock.move(seconds)
        await asyncio.sleep(0.01)  # it looks at the clock `hz` times a second
