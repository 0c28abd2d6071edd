"""One way to run programs, in a process of its own, so that all its CPU time can be counted: `python -m loadtest.agent KIND`.

Requests and reports are frames on standard input and output. The clock runs from the moment that the programs are here until
the last of them has ended. Kinds:

    spawn    a fresh interpreter per program
    nsjail   a fresh nsjail with a fresh interpreter per program
    zygote   the worker's pool, nothing around it
    http     a client of the service at the URL that follows: here only the load is made, the service is counted on its own
    run, run_code, batch, long-batch    as `http`, but plain requests to that route: the first two one program each
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import httpx
import msgspec
from msgspec import Struct

from exec_client import AsyncClient, ExecError, InfraFailure
from exec_wire import Call, Limits, Result
from loadtest.workload import Program
from worker.config import WorkerConfig, default_packages
from worker.pool import Pool, SlotBusy, ZygoteLost
from worker.sandbox import jail, kernel

DEADLINE_S = 600.0  # of a call in the queue: a whole batch is submitted at once
BUSY_PAUSE_S = 0.02
IN_FLIGHT = 4  # requests at the same time for each program that can run, by what sends one program at a time
SHOWN_CHARS = 1000  # of each stream, by code-judge
CUT = "[cut]"  # instead of the last line of a stream that was longer


class Outcome(Struct, frozen=True):
    """What became of one program, and how long it took from its start (`http`: from when the batch left, queue included)."""

    status: str
    stdout: str
    last_line: str  # of stderr: what a traceback says in the end
    latency_s: float


class Request(Struct, frozen=True):
    programs: list[Program]
    concurrency: int


class Report(Struct, frozen=True):
    outcomes: list[Outcome]
    wall_s: float


class Agent(ABC):
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]: ...


def last_line(stderr: str) -> str:
    return stderr.rstrip().rpartition("\n")[2]


class Spawn(Agent):
    """In an empty virtual environment: what else is installed on a machine may want to run at every start."""

    def __init__(self) -> None:
        self._venv = tempfile.TemporaryDirectory(prefix="exec-bench-")
        subprocess.run([jail.interpreter(), "-m", "venv", "--without-pip", self._venv.name], check=True)
        Path(self._venv.name).chmod(0o755)  # for the uid in the jail
        self._interpreter = f"{self._venv.name}/bin/python"
        self._environment = {**jail.ENVIRONMENT, "PYTHONPATH": default_packages(), "PATH": os.defpath}

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        with ThreadPoolExecutor(concurrency) as threads:
            return await asyncio.to_thread(lambda: list(threads.map(self._run_one, programs)))

    def _run_one(self, program: Program) -> Outcome:
        started = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="exec-bench-"))
        try:
            status, stdout, stderr = self._execute(program, folder)
        finally:
            shutil.rmtree(folder)
        return Outcome(status, stdout, last_line(stderr), time.perf_counter() - started)

    def _execute(self, program: Program, folder: Path) -> tuple[str, str, str]:
        (folder / "main.py").write_text(program.code)
        return run_command(
            self._command(folder), program, {**self._environment, "HOME": str(folder), "TMPDIR": str(folder)}, folder
        )

    def _command(self, folder: Path) -> list[str]:
        return [self._interpreter, "main.py"]

    async def __aexit__(self, *_: object) -> None:
        self._venv.cleanup()


def run_command(command: list[str], program: Program, environment: dict[str, str], folder: Path) -> tuple[str, str, str]:
    """Status, stdout and stderr, as a service without a sandbox would find them."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    timed_out = False
    try:
        out, err = process.communicate(program.stdin.encode(), program.wall_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return _status(process.returncode, timed_out), out.decode(errors="replace"), err.decode(errors="replace")


def _status(code: int, timed_out: bool) -> str:
    if timed_out:
        return "timeout"
    if code == 0:
        return "ok"
    return "signal" if code < 0 else "error"


class Nsjail(Spawn):
    """The real binary with namespaces, a read-only root, a tmpfs, rlimits and a seccomp filter.

    Left out, in favour of this arm: control groups, Landlock, an init process, checks of what is left afterwards.
    """

    INSIDE_UID, OUTSIDE_UID = 1000, 99_999

    async def __aenter__(self) -> Self:
        self._nsjail = str(jail.nsjail_binary())
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        self._folder = Path(tempfile.mkdtemp(prefix="exec-bench-"))
        kernel.mount("tmpfs", self._folder, "tmpfs", options="size=1m,mode=755")
        self._show("python", Path(sys.base_prefix))
        self._show("packages", Path(default_packages()))
        self._show("venv", Path(self._venv.name))
        self._config = self._folder / "nsjail.cfg"
        self._config.write_text(self._config_text())
        return self

    def _show(self, name: str, source: Path) -> None:
        """Bound where every uid can reach it, read-only: a home folder above it may be closed."""
        (self._folder / name).mkdir()
        kernel.mount(source.resolve(), self._folder / name, flags=kernel.MS_BIND)
        kernel.mount("none", self._folder / name, flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)

    async def __aexit__(self, *_: object) -> None:
        kernel.unmount(self._folder)  # with what is bound in it
        self._folder.rmdir()  # never a recursive removal: it would empty what was only shown there
        await super().__aexit__()

    def _execute(self, program: Program, folder: Path) -> tuple[str, str, str]:
        folder.chmod(0o755)
        (folder / "main.py").write_text(program.code)
        return run_command(self._command(folder), program, {}, folder)

    def _command(self, folder: Path) -> list[str]:
        options = ["--really_quiet", "-C", str(self._config), "-R", f"{folder}/main.py:/main.py"]
        return [self._nsjail, *options, "--", "/venv/bin/python", "/main.py"]

    def _config_text(self) -> str:
        environment = {**jail.ENVIRONMENT, "PYTHONPATH": "/opt/packages"}
        prefix = Path(sys.base_prefix)
        return "\n".join(
            [
                'mode: ONCE  time_limit: 60  keep_env: false  log_level: FATAL  hostname: "sandbox"  cwd: "/tmp"',
                "rlimit_as: 4096  rlimit_cpu: 10  rlimit_fsize: 64  rlimit_nofile: 256  rlimit_nproc: 64  rlimit_stack: 8",
                f'uidmap {{ inside_id: "{self.INSIDE_UID}" outside_id: "{self.OUTSIDE_UID}" count: 1 }}',
                f'gidmap {{ inside_id: "{self.INSIDE_UID}" outside_id: "{self.OUTSIDE_UID}" count: 1 }}',
                "clone_newnet: true  iface_no_lo: true",
                'mount { dst: "/" fstype: "tmpfs" rw: false options: "size=1m,mode=755" }',
                *(_bind(folder) for folder in ("/usr", "/bin", "/lib", "/lib64") if Path(folder).exists()),
                *([] if prefix == Path("/usr") else [_bind(self._folder / "python", prefix)]),
                _bind(self._folder / "packages", "/opt/packages"),
                _bind(self._folder / "venv", "/venv"),
                *(f'mount {{ src: "/dev/{name}" dst: "/dev/{name}" is_bind: true rw: true }}' for name in ("null", "urandom")),
                'mount { dst: "/tmp" fstype: "tmpfs" rw: true options: "size=64m,mode=1777" }',
                'mount { dst: "/proc" fstype: "proc" }',
                *(f'envar: "{name}={value}"' for name, value in environment.items()),
                'seccomp_string: "ERRNO(1) { ptrace, process_vm_readv, process_vm_writev, bpf, keyctl, add_key, request_key,"',
                'seccomp_string: " perf_event_open, userfaultfd, kexec_load, init_module, finit_module, delete_module,"',
                'seccomp_string: " mount, umount, pivot_root, unshare, setns } DEFAULT ALLOW"',
            ]
        )


def _bind(source: str | Path, target: str | Path | None = None) -> str:
    return f'mount {{ src: "{source}" dst: "{target or source}" is_bind: true nosuid: true nodev: true }}'


def _call(program: Program) -> Call:
    limits = Limits(wall_s=program.wall_s)
    return Call(program.code, stdin=program.stdin, limits=limits, deadline_s=DEADLINE_S)


def _outcome(result: Result, latency_s: float) -> Outcome:
    status = result.status if result.blame != "infra" else f"{result.status} (infra) {result.error}".rstrip()
    return Outcome(status, result.stdout, last_line(result.stderr), latency_s)


class Zygote(Agent):
    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            self._pool = await stack.enter_async_context(Pool(WorkerConfig()))
            await self._pool.wait_ready()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        waiting = deque(enumerate(map(_call, programs)))
        outcomes: dict[int, Outcome] = {}

        async def work() -> None:
            slot = self._pool.take_slot()
            while waiting:
                index, call = waiting.popleft()
                outcomes[index] = await self._run_one(call, slot)
            self._pool.give_back(slot)

        await asyncio.gather(*(work() for _ in range(min(concurrency, self._pool.slots))))
        return [outcomes[index] for index in range(len(programs))]

    async def _run_one(self, call: Call, slot: int) -> Outcome:
        started = time.perf_counter()
        while True:
            try:
                result = await self._pool.run(call, slot, DEADLINE_S)
            except ZygoteLost:
                return Outcome("zygote lost", "", "", time.perf_counter() - started)
            except SlotBusy:
                await asyncio.sleep(BUSY_PAUSE_S)
            else:
                return _outcome(result, time.perf_counter() - started)


class Http(Agent):
    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        self._client = await AsyncClient(self._url).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        """All at once; how many run at a time is the service's business."""
        started = time.perf_counter()
        outcomes: dict[int, Outcome] = {}
        async for result in self._client.as_completed(map(_call, programs), return_exceptions=True):
            latency_s = time.perf_counter() - started
            if isinstance(result, InfraFailure) and result.result is not None:
                outcomes[result.index or 0] = _outcome(result.result, latency_s)
            elif isinstance(result, ExecError):
                outcomes[result.index or 0] = Outcome(f"{type(result).__name__}: {result}", "", "", latency_s)
            else:
                outcomes[result.index] = _outcome(result, latency_s)
        return [outcomes[index] for index in range(len(programs))]


class Plain(Agent):
    """Requests as any HTTP client makes them: `ask` is the body of one program, `tell` what its answer says."""

    path = ""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _post(self, body: object) -> Any:
        content = msgspec.json.encode(body)
        answer = await self._http.post(self.path, content=content, headers={"content-type": "application/json"})
        answer.raise_for_status()
        return msgspec.json.decode(answer.content)

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        waiting = deque(enumerate(programs))
        outcomes: dict[int, Outcome] = {}

        async def work() -> None:
            while waiting:
                index, program = waiting.popleft()
                started = time.perf_counter()
                answer = await self._post(self.ask(program))
                outcomes[index] = self.tell(answer, time.perf_counter() - started)

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT * concurrency)))
        return [outcomes[index] for index in range(len(programs))]

    @abstractmethod
    def ask(self, program: Program) -> object: ...

    @abstractmethod
    def tell(self, answer: Any, latency_s: float) -> Outcome: ...


class Run(Plain):
    path = "/v1/run"

    def ask(self, program: Program) -> object:
        return _call(program)

    def tell(self, answer: Any, latency_s: float) -> Outcome:
        return _outcome(msgspec.convert(answer, Result), latency_s)


class RunCode(Plain):
    """SandboxFusion's."""

    path = "/run_code"

    def ask(self, program: Program) -> object:
        return {"code": program.code, "language": "python", "stdin": program.stdin, "run_timeout": program.wall_s}

    def tell(self, answer: Any, latency_s: float) -> Outcome:
        ran = answer["run_result"]
        status = _status(ran["return_code"] or 0, ran["status"] == "TimeLimitExceeded")
        return Outcome(status, ran["stdout"], last_line(ran["stderr"]), latency_s)


class Batch(Run):
    path, many, results = "/v1/batch?stream=false", "calls", "results"

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        started = time.perf_counter()
        answer = await self._post({self.many: [self.ask(program) for program in programs]})
        latency_s = time.perf_counter() - started
        return [self.tell(one, latency_s) for one in answer[self.results]]


class LongBatch(Batch):
    """code-judge's. A limit of its own for each program is not in its language."""

    path, many = "/run/long-batch", "submissions"

    def ask(self, program: Program) -> object:
        return {"type": "python", "solution": program.code, "input": program.stdin}

    def tell(self, answer: Any, latency_s: float) -> Outcome:
        status = (
            "ok"
            if answer["run_success"]
            else {"": "error", "worker_timeout": "timeout"}.get(answer["reason"], answer["reason"])
        )
        stderr = answer["stderr"]
        return Outcome(status, answer["stdout"], CUT if len(stderr) == SHOWN_CHARS else last_line(stderr), latency_s)


def send_frame(stream: BinaryIO, message: Struct | bool) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive_frame(stream: BinaryIO) -> bytes | None:
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 8 else None


async def serve(agent: Agent) -> None:
    """Answer requests until standard input ends."""
    async with agent:
        send_frame(sys.stdout.buffer, True)
        while (frame := await asyncio.to_thread(receive_frame, sys.stdin.buffer)) is not None:
            request = msgspec.msgpack.decode(frame, type=Request)
            started = time.perf_counter()
            outcomes = await agent.run(request.programs, request.concurrency)
            send_frame(sys.stdout.buffer, Report(outcomes, time.perf_counter() - started))


def main() -> None:
    import uvloop

    kind, *rest = sys.argv[1:]
    agents: dict[str, type[Agent]] = {"spawn": Spawn, "nsjail": Nsjail, "zygote": Zygote, "http": Http}
    agents |= {"run": Run, "run_code": RunCode, "batch": Batch, "long-batch": LongBatch}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the measurement, which closes our standard input
    uvloop.run(serve(agents[kind](*rest)))


if __name__ == "__main__":
    main()
