"""A real server whose wall clock the tests move, so that leases lapse and keys expire without waiting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from loadtest.redis_server import NoServer, RedisServer, find_server


def need_redis() -> None:
    """Without a server: skipped on a laptop, failed in CI."""
    try:
        find_server()
    except NoServer as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


class MovedClock:
    """A clock for other processes: the real one and an offset."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="exec-clock-")
        folder = Path(self._folder.name)
        self._file, library = folder / "offset", folder / "clock.so"
        self._offset_ns = 0
        self.move(0)
        source = Path(__file__).with_name("moved_clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._file)}

    def move(self, seconds: float) -> None:
        self._offset_ns += round(seconds * 1e9)
        # In place: processes have the file mapped.
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.write(self._offset_ns.to_bytes(8, "little", signed=True))

    def close(self) -> None:
        self._folder.cleanup()


class MovedServer(RedisServer):
    """A server in a time of its own."""

    def __init__(self, **options: str) -> None:
        self.clock = MovedClock()
        super().__init__(environment=self.clock.environment, hz="500", **options)

    async def pass_s(self, seconds: float) -> None:
        self.clock.move(seconds)
        await asyncio.sleep(0.01)  # it looks at the clock `hz` times a second

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.clock.close()
