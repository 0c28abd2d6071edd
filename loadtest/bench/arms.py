"""The arms of a comparison: ways to run the same programs, each with all of its processes counted.

    async with open_arm("zygote") as arm:
        run = await arm.run(programs, concurrency=2)

An arm is an agent (`loadtest.agent`) in a process of its own; `http` has a real `exec-service up` besides, `redis` a gateway, a
worker and a Redis, and there the agent is only the load. The arms of single routes are such agents too; they share a service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from loadtest import meter
from loadtest.agent import Outcome, Report, Request
from loadtest.ports import free_port
from loadtest.workload import Program

ROUTES = ("run", "run_code", "batch", "long-batch")
ARMS = ("spawn", "nsjail", "zygote", "http", "redis", *ROUTES)
START_S = 90.0
UP, CLUSTER = ("exec_service", "up", "--grpc-port", "0", "--port"), ("loadtest.cluster_up",)  # modules; a port follows
SETTLE_S = 0.05  # after the last result: what is reaped and cleaned up then belongs to the calls


class ArmFailed(Exception):
    """An arm does not start, or ended; the message has what it wrote."""


class Run(Struct, frozen=True):
    """Some programs through one arm."""

    outcomes: list[Outcome]
    wall_s: float
    cpu_s: float  # of everything that serves
    load_cpu_s: float  # of what makes the load, where that is apart
    others_share: float  # of the machine's cores, used by processes that are not ours

    @property
    def calls_per_s(self) -> float:
        return len(self.outcomes) / self.wall_s

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / len(self.outcomes)

    @property
    def load_cpu_ms(self) -> float:
        return 1000 * self.load_cpu_s / len(self.outcomes)


class Counted:
    """A process that was started in a CPU meter of its own."""

    def __init__(self, process: asyncio.subprocess.Process, cpu: meter.CpuMeter, log: IO[bytes]) -> None:
        self.process, self.cpu, self._log = process, cpu, log

    def used_s(self) -> float:
        return self.cpu.used_s(self.process.pid)

    def log_text(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


Service = tuple[Counted, str]  # and its address


@contextlib.asynccontextmanager
async def counted(name: str, command: list[str], root: Path | None = None) -> AsyncGenerator[Counted, None]:
    """`root`: a source tree whose modules the command uses instead of ours."""
    cpu = meter.make_meter(name)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *cpu.command(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=root,
            env=None if root is None else {**os.environ, "PYTHONPATH": str(root)},
            start_new_session=True,
            limit=1 << 30,
        )
        try:
            yield Counted(process, cpu, log)
        finally:
            await _end(process)
            cpu.close()


async def _end(process: asyncio.subprocess.Process, patience_s: float = 30.0) -> None:
    """An agent ends with its standard input, the service with a signal."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        process.kill()
        await process.wait()


class Arm:
    def __init__(self, name: str, agent: Counted, service: Counted | None = None, url: str = "") -> None:
        self.name, self.url = name, url
        self._agent, self._service = agent, service

    @property
    def service(self) -> Service | None:
        return (self._service, self.url) if self._service else None

    @property
    def counted_by(self) -> str:
        return self._agent.cpu.how

    @property
    def service_pid(self) -> int:
        return (self._service or self._agent).process.pid

    async def run(self, programs: list[Program], concurrency: int) -> Run:
        busy, cpu, load = meter.machine_busy_s(), self._cpu_s(), self._load_s()
        started = time.perf_counter()
        report = await self._ask(Request(programs, concurrency))
        await asyncio.sleep(SETTLE_S)
        elapsed_s = time.perf_counter() - started
        cpu, load = self._cpu_s() - cpu, self._load_s() - load
        return Run(report.outcomes, report.wall_s, cpu, load, meter.others_share(busy, cpu + load, elapsed_s))

    def _cpu_s(self) -> float:
        return (self._service or self._agent).used_s()

    def _load_s(self) -> float:
        return self._agent.used_s() if self._service else 0.0

    async def _ask(self, request: Request) -> Report:
        stdin, stdout = self._agent.process.stdin, self._agent.process.stdout
        assert stdin is not None and stdout is not None
        data = msgspec.msgpack.encode(request)
        stdin.write(len(data).to_bytes(8, "little") + data)
        try:
            await stdin.drain()
            return msgspec.msgpack.decode(await _receive(stdout), type=Report)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ArmFailed(f"{self.name} ended:\n{self._agent.log_text()}") from error


async def _receive(stream: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await stream.readexactly(8), "little")
    return await stream.readexactly(size)


@contextlib.asynccontextmanager
async def open_arm(name: str, shared: Service | None = None, root: Path | None = None) -> AsyncGenerator[Arm, None]:
    """`shared`: a service that is there already, for an arm that needs one. `root`: the source tree of the service."""
    async with contextlib.AsyncExitStack() as stack:
        if name not in ("http", "redis", *ROUTES):
            yield Arm(name, await _agent(stack, name))
            return
        service, url = shared or await _service(stack, CLUSTER if name == "redis" else UP, root)
        yield Arm(name, await _agent(stack, "http" if name == "redis" else name, url), service, url)


@contextlib.asynccontextmanager
async def attach_arm(name: str, kind: str, url: str) -> AsyncGenerator[Arm, None]:
    """An agent of this kind against a service that is not ours to count."""
    async with contextlib.AsyncExitStack() as stack:
        yield Arm(name, await _agent(stack, kind, url), url=url)


async def _agent(stack: contextlib.AsyncExitStack, name: str, *arguments: str) -> Counted:
    agent = await stack.enter_async_context(counted(name, [sys.executable, "-m", "loadtest.agent", name, *arguments]))
    assert agent.process.stdout is not None
    try:
        await asyncio.wait_for(_receive(agent.process.stdout), START_S)
    except (asyncio.IncompleteReadError, TimeoutError) as error:
        raise ArmFailed(f"{name} does not start:\n{agent.log_text()}") from error
    return agent


async def _service(stack: contextlib.AsyncExitStack, module: Sequence[str], root: Path | None) -> tuple[Counted, str]:
    """A service with a port of its own, ready."""
    port = free_port()
    command = [sys.executable, "-m", *module, str(port)]
    service = await stack.enter_async_context(counted(f"service-{port}", command, root))
    stack.callback(_terminate, service.process)
    url = f"http://127.0.0.1:{port}"
    give_up = time.monotonic() + START_S
    while not await asyncio.to_thread(_is_ready, url):
        if service.process.returncode is not None or time.monotonic() > give_up:
            raise ArmFailed(f"the service does not start:\n{service.log_text()}")
        await asyncio.sleep(0.1)
    return service, url


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _is_ready(url: str) -> bool:
    """A gateway of a cluster is ready before its workers are."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5), urllib.request.urlopen(f"{url}/v1/info", timeout=5) as answer:
            return bool(msgspec.json.decode(answer.read())["slots"])
    except OSError:
        return False


async def info(url: str) -> dict[str, Any]:
    def read() -> bytes:
        with urllib.request.urlopen(f"{url}/v1/info", timeout=10) as answer:
            data: bytes = answer.read()
            return data

    return msgspec.json.decode(await asyncio.to_thread(read), type=dict[str, Any])
