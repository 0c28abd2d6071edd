"""A wall clock that can jump, for other processes, and a Redis server that uses it. Needs a C compiler."""

import os
import subprocess
import tempfile
from pathlib import Path

from loadtest.support.redis_server import RedisServer


class MovedClock:
    """The real clock plus an offset, for processes started with `environment`."""

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
        # Written in place: processes map this file.
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.write(self._offset_ns.to_bytes(8, "little", signed=True))

    def close(self) -> None:
        self._folder.cleanup()


class MovedServer(RedisServer):
    """A Redis server on a moved clock, which it reads `hz` times a second."""

    def __init__(self, hz: int = 500, **options: str) -> None:
        self.clock = MovedClock()
        super().__init__(0, self.clock.environment, hz=str(hz), **options)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.clock.close()
