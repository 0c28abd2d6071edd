"""The arms of a comparison: ways to run the same programs, with the CPU time of all processes of each arm.

    async with open_arm("zygote") as arm:
        run = await arm.run(programs, concurrency=2)

An arm is an agent (`loadtest.bench.agent`) in a process of its own. `http` also has a real `exec-service up`, `redis` a
gateway, a worker and a Redis server; there the agent only makes the load. The arms of single endpoints share one service.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from loadtest.bench.agent import Outcome, Report, Request
from loadtest.support import meter
from loadtest.support.processes import ROOT, free_port
from loadtest.support.workload import Program

ENDPOINTS = ("run", "run_code", "batch", "long-batch")
ARMS = ("spawn", "nsjail", "zygote", "http", "redis", *ENDPOINTS)
START_S = 90.0
CLUSTER = Path(__file__).with_name("cluster_up.py")
SETTLE_S = 0.05  # after the last result: cleaning up belongs to the calls


class ArmFailed(Exception):
    """An arm does not start, or ended; the message has its log."""


class Run(Struct, frozen=True):
    """Some programs through one arm."""

    outcomes: list[Outcome]
    wall_s: float
    cpu_s: float  # of the service, or of the agent that runs the programs itself
    load_cpu_s: float  # of the load generator, where it is a process of its own
    others_share: float  # of the cores, used by other processes

    @property
    def calls_per_s(self) -> float:
        return len(self.outcomes) / self.wall_s

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / len(self.outcomes)


class Counted:
    """A process in a CPU meter of its own."""

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
    """`root`: the source tree whose modules the command uses."""
    cpu = meter.make_meter(name)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *cpu.command(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=root or ROOT,
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
    """An agent ends with its standard input; the service gets a signal before."""
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
    """`shared`: a running service for an arm that needs one. `root`: the source tree of the service."""
    async with contextlib.AsyncExitStack() as stack:
        if name not in ("http", "redis", *ENDPOINTS):
            yield Arm(name, await _agent(stack, name))
            return
        service, url = shared or await _service(stack, name, root)
        yield Arm(name, await _agent(stack, "http" if name == "redis" else name, url), service, url)


@contextlib.asynccontextmanager
async def attach_arm(name: str, kind: str, url: str) -> AsyncGenerator[Arm, None]:
    """An agent of this kind against a service whose CPU time cannot be counted."""
    async with contextlib.AsyncExitStack() as stack:
        yield Arm(name, await _agent(stack, kind, url), url=url)


async def _agent(stack: contextlib.AsyncExitStack, name: str, *arguments: str) -> Counted:
    agent = await stack.enter_async_context(counted(name, [sys.executable, "-m", "loadtest.bench.agent", name, *arguments]))
    assert agent.process.stdout is not None
    try:
        await asyncio.wait_for(_receive(agent.process.stdout), START_S)
    except (asyncio.IncompleteReadError, TimeoutError) as error:
        raise ArmFailed(f"{name} does not start:\n{agent.log_text()}") from error
    return agent


async def _service(stack: contextlib.AsyncExitStack, name: str, root: Path | None) -> Service:
    """Start a service of that source tree on a port of its own and wait until it is ready."""
    port = free_port()
    up = ["-m", "exec_service", "up", "--grpc-port", "0", "--port", str(port)]
    command = [sys.executable, *([str(CLUSTER), str(port)] if name == "redis" else up)]
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
    """Also asks for slots: the gateway of a cluster is ready before its workers."""
    try:
        _get(f"{url}/readyz")
        return bool(msgspec.json.decode(_get(f"{url}/v1/info"))["slots"])
    except OSError:
        return False


async def info(url: str) -> dict[str, Any]:
    return msgspec.json.decode(await asyncio.to_thread(_get, f"{url}/v1/info"), type=dict[str, Any])


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        data: bytes = answer.read()
        return data
