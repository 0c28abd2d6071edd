"""A real server, or a reason why there is none; and time that passes there without waiting."""

import asyncio
import contextlib
import functools
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from common import unavailable

from loadtest.support import moved_clock
from loadtest.support.redis_server import NoServer, find_server

try:
    from loadtest.support.redis_server import servers
except ImportError:  # a commit that cannot list them: see tests/trust.py

    def servers() -> list[str]:
        return [find_server()]


def need_redis() -> None:
    """Without a server: skipped on a laptop, failed in CI."""
    try:
        find_server()
    except NoServer as error:
        unavailable(str(error))


@functools.cache
def server_params() -> list[Any]:
    """The paths of all servers, named by their versions such as `redis-7.0.15`; a name alone where there is none."""
    return [pytest.param(path, id=_name(path)) for path in servers()] or [pytest.param("", id="no server")]


def _name(path: str) -> str:
    words = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    kind, _, rest = words.partition(" server v=")
    return f"{kind.lower()}-{rest.split()[0]}"


@contextlib.contextmanager
def chosen(path: str) -> Iterator[None]:
    """Every server that is started meanwhile is this program."""
    need_redis()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXEC_REDIS_SERVER", path)
        yield


class MovedServer(moved_clock.MovedServer):
    """Leases lapse and keys expire there when a test says so."""

    async def pass_s(self, seconds: float) -> None:
        self.clock.move(seconds)
        await asyncio.sleep(0.01)  # it looks at the clock `hz` times a second
