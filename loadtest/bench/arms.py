"""The arms of a comparison: ways to run the same programs, with the CPU time of all processes of each arm.

    with open_arm("zygote") as arm:
        run = arm.run(programs, concurrency=2)

An arm is an agent (`loadtest.bench.agent`) in a process of its own. `http` also has a real `exec-service up`, `redis` a
gateway, a worker and a Redis server; there the agent only makes the load. The arms of single endpoints share one service.
"""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from loadtest.bench.agent import Outcome, Report, Request, receive_frame, send_frame
from loadtest.support import meter
from loadtest.support.processes import ROOT, free_port
from loadtest.support.workload import Program

ENDPOINTS = ("run", "run_code", "batch", "long-batch")
ARMS = ("spawn", "nsjail", "zygote", "http", "redis", *ENDPOINTS)
START_S, END_S = 90.0, 30.0
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


class Counted(NamedTuple):
    """A process in a CPU meter of its own."""

    process: subprocess.Popen[bytes]
    cpu: meter.CpuMeter
    log: Any

    def used_s(self) -> float:
        return self.cpu.used_s(self.process.pid)

    def log_text(self) -> str:
        self.log.seek(0)
        return str(self.log.read().decode(errors="replace")[-4000:])


@contextlib.contextmanager
def counted(name: str, command: list[str], root: Path | None = None) -> Iterator[Counted]:
    """A Python process with the modules of the source tree `root`, which ends with its standard input."""
    cpu = meter.make_meter(name)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            cpu.command([sys.executable, *command]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=root or ROOT,
            env=None if root is None else {**os.environ, "PYTHONPATH": str(root)},
            start_new_session=True,
        )
        try:
            yield Counted(process, cpu, log)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=END_S)
            process.kill()
            process.wait()
            cpu.close()


class Arm:
    def __init__(self, name: str, agent: Counted, service: Counted | None = None, url: str = "") -> None:
        self.name, self.url, self.service = name, url, service
        self._agent = agent

    @property
    def counted_by(self) -> str:
        return self._agent.cpu.how

    @property
    def service_pid(self) -> int:
        return (self.service or self._agent).process.pid

    @property
    def agent_pid(self) -> int:
        return self._agent.process.pid

    def run(self, programs: list[Program], concurrency: int) -> Run:
        busy, cpu, load = meter.machine_busy_s(), self._cpu_s(), self._load_s()
        started = time.perf_counter()
        report = msgspec.msgpack.decode(self._ask(Request(programs, concurrency)), type=Report)
        time.sleep(SETTLE_S)
        elapsed_s = time.perf_counter() - started
        cpu, load = self._cpu_s() - cpu, self._load_s() - load
        return Run(report.outcomes, report.wall_s, cpu, load, meter.others_share(busy, cpu + load, elapsed_s))

    def _cpu_s(self) -> float:
        return (self.service or self._agent).used_s()

    def _load_s(self) -> float:
        return self._agent.used_s() if self.service else 0.0

    def _ask(self, request: Request) -> bytes:
        stdin, stdout = self._agent.process.stdin, self._agent.process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            send_frame(stdin, request)
            if (frame := receive_frame(stdout)) is not None:
                return frame
        raise ArmFailed(f"{self.name} ended:\n{self._agent.log_text()}")


@contextlib.contextmanager
def open_arm(name: str, shared: Arm | None = None, root: Path | None = None) -> Iterator[Arm]:
    """`shared`: an arm whose service this one uses. `root`: the source tree of the service."""
    with contextlib.ExitStack() as stack:
        if name not in ("http", "redis", *ENDPOINTS):
            yield Arm(name, stack.enter_context(_agent(name)))
            return
        service, url = (shared.service, shared.url) if shared else stack.enter_context(_service(name, root))
        yield Arm(name, stack.enter_context(_agent("http" if name == "redis" else name, url)), service, url)


@contextlib.contextmanager
def attach_arm(name: str, kind: str, url: str) -> Iterator[Arm]:
    """An agent of this kind against a service whose CPU time cannot be counted."""
    with _agent(kind, url) as agent:
        yield Arm(name, agent, url=url)


@contextlib.contextmanager
def _agent(name: str, *arguments: str) -> Iterator[Counted]:
    with counted(name, ["-m", "loadtest.bench.agent", name, *arguments]) as agent:
        stdout = agent.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], START_S)[0] or receive_frame(stdout) is None:
            agent.process.kill()
            raise ArmFailed(f"{name} does not start:\n{agent.log_text()}")
        yield agent


@contextlib.contextmanager
def _service(name: str, root: Path | None) -> Iterator[tuple[Counted, str]]:
    """A service of that source tree on a port of its own, and its address, when it is ready."""
    port = free_port()
    up = ["-m", "exec_service", "up", "--grpc-port", "0", "--port", str(port)]
    url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with counted(f"service-{port}", [str(CLUSTER), str(port)] if name == "redis" else up, root) as service:
        try:
            while not _is_ready(url):
                if service.process.poll() is not None or time.monotonic() > give_up:
                    raise ArmFailed(f"the service does not start:\n{service.log_text()}")
                time.sleep(0.1)
            yield service, url
        finally:
            service.process.terminate()


def _is_ready(url: str) -> bool:
    """Also asks for slots: the gateway of a cluster is ready before its workers."""
    try:
        urllib.request.urlopen(f"{url}/readyz", timeout=10).close()
        return bool(info(url)["slots"])
    except OSError:
        return False


def info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/info", timeout=10) as answer:
        return msgspec.json.decode(answer.read(), type=dict[str, Any])
