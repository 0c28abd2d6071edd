"""One way to run programs, as a process of its own, so that its CPU time can be counted: `python -m loadtest.bench.agent KIND`.

Requests and reports are frames on standard input and output. The clock runs from the arrival of the programs until the last of
them has ended. Kinds:

    spawn    a fresh interpreter per program
    nsjail   a fresh nsjail with a fresh interpreter per program
    zygote   the worker's pool alone
    http     a client of the service at the URL that follows; only makes the load, the service is counted on its own
    run, run_code, batch, long-batch    as `http`, with plain requests to that endpoint; the first two send one program each
"""

import asyncio
import contextlib
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Self

import httpx
import msgspec
from msgspec import Struct

from exec_client import AsyncClient, ExecError, InfraFailure
from exec_service.config import read_environment
from exec_wire import Call, Limits, Result
from loadtest.support.workload import Program
from worker.config import WorkerConfig
from worker.pool import Pool, SlotBusy, ZygoteLost
from worker.sandbox import interpreter, jail, kernel

DEADLINE_S = 600.0  # covers the time in the queue: a whole batch is submitted at once
BUSY_PAUSE_S = 0.02
IN_FLIGHT = 4  # requests in flight per running program, for endpoints that take one program per request
SHOWN_CHARS = 1000  # of each output stream that code-judge's endpoint returns
CUT = "[cut]"  # replaces the last line of a stream that was longer
STARVED = "timeout (infra)"  # a time-out while the program got no CPU: correct on a busy machine, and counted


class Outcome(Struct, frozen=True):
    """The outcome of one program, with its latency from its start (`http`: from when the batch was sent, queue included)."""

    status: str
    stdout: str
    last_line: str  # of stderr: the exception of a traceback
    latency_s: float


def as_shown(agent: str, reference: Outcome, outcome: Outcome) -> Outcome:
    """The reference as this agent returns it: code-judge's endpoint cuts both streams."""
    if agent != "long-batch":
        return reference
    last_line = outcome.last_line if outcome.last_line == CUT else reference.last_line
    return msgspec.structs.replace(reference, stdout=reference.stdout[:SHOWN_CHARS], last_line=last_line)


def difference(reference: Outcome, outcome: Outcome) -> str:
    """How an outcome differs from that of a plain interpreter; empty if it does not."""
    if outcome.status != reference.status:
        return f"status {outcome.status!r} instead of {reference.status!r} ({outcome.last_line[:100]!r})"
    if reference.status == "timeout":  # a plain interpreter loses output that was not flushed
        return "" if outcome.stdout.startswith(reference.stdout) else f"stdout {outcome.stdout[:100]!r} before the time-out"
    if outcome.stdout != reference.stdout:
        return f"stdout {outcome.stdout[:100]!r} instead of {reference.stdout[:100]!r}"
    if reference.status == "error" and outcome.last_line != reference.last_line:
        return f"traceback ends in {outcome.last_line[:100]!r} instead of {reference.last_line[:100]!r}"
    return ""


class Request(Struct, frozen=True):
    programs: list[Program]
    concurrency: int


class Report(Struct, frozen=True):
    outcomes: list[Outcome]
    wall_s: float


class Agent(contextlib.AbstractAsyncContextManager["Agent"]):
    @abstractmethod
    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]: ...


async def run_each(
    run_one: Callable[[Program], Awaitable[Outcome]], programs: list[Program], concurrency: int
) -> list[Outcome]:
    waiting = deque(enumerate(programs))
    outcomes: dict[int, Outcome] = {}

    async def work() -> None:
        while waiting:
            index, program = waiting.popleft()
            outcomes[index] = await run_one(program)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [outcomes[index] for index in range(len(programs))]


def worker_config() -> WorkerConfig:
    """As a worker has it that this process starts: every arm runs the same Python with the same packages."""
    return read_environment(WorkerConfig, os.environ)


def last_line(stderr: str) -> str:
    return stderr.rstrip().rpartition("\n")[2]


class Spawn(Agent):
    """The programs' interpreter, in an empty virtual environment: packages of the machine may run code at every start."""

    def __init__(self) -> None:
        self._config = worker_config()
        self._python = interpreter.find(self._config.program_python, Path(self._config.packages))
        self._venv = tempfile.TemporaryDirectory(prefix="exec-bench-")
        subprocess.run([self._python.path, "-m", "venv", "--without-pip", self._venv.name], check=True)
        Path(self._venv.name).chmod(0o755)  # for the uid in the jail
        self._interpreter = f"{self._venv.name}/bin/python"
        self._environment = {**jail.ENVIRONMENT, "PYTHONPATH": self._config.packages, "PATH": os.defpath}

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        with ThreadPoolExecutor(concurrency) as threads:
            return await asyncio.to_thread(lambda: list(threads.map(self._run_one, programs)))

    def _run_one(self, program: Program) -> Outcome:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="exec-bench-") as name:
            (folder := Path(name)).chmod(0o755)  # for the uid in the jail
            (folder / "main.py").write_text(program.code)
            status, stdout, stderr = run_command(self._command(folder), program, self._variables(folder), folder)
        return Outcome(status, stdout, last_line(stderr), time.perf_counter() - started)

    def _variables(self, folder: Path) -> dict[str, str]:
        return {**self._environment, "HOME": str(folder), "TMPDIR": str(folder)}

    def _command(self, folder: Path) -> list[str]:
        return [self._interpreter, "main.py"]

    async def __aexit__(self, *_: object) -> None:
        self._venv.cleanup()


def run_command(command: list[str], program: Program, environment: dict[str, str], folder: Path) -> tuple[str, str, str]:
    """Status, stdout and stderr of a program without a sandbox."""
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
    """The nsjail binary with namespaces, a read-only root, a tmpfs, rlimits and a seccomp filter.

    It has no control groups, Landlock, init process or checks for leftovers, which makes this arm faster.
    """

    async def __aenter__(self) -> Self:
        self._nsjail = str(jail.nsjail_binary())
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        self._folder = Path(tempfile.mkdtemp(prefix="exec-bench-"))
        kernel.mount("tmpfs", self._folder, "tmpfs", options="size=1m,mode=755")
        self._show("python", Path(self._python.prefix))
        self._show("packages", Path(self._config.packages))
        self._show("venv", Path(self._venv.name))
        self._jail_config = self._folder / "nsjail.cfg"
        self._jail_config.write_text(self._config_text())
        return self

    def _show(self, name: str, source: Path) -> None:
        """Bind-mount it read-only where every uid can read it: a home folder above it may be private."""
        (self._folder / name).mkdir()
        kernel.mount(source.resolve(), self._folder / name, flags=kernel.MS_BIND)
        kernel.mount("none", self._folder / name, flags=kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY)

    async def __aexit__(self, *_: object) -> None:
        kernel.unmount(self._folder)  # with the bind mounts in it
        self._folder.rmdir()  # never a recursive removal: it would delete the sources of the bind mounts
        await super().__aexit__()

    def _variables(self, folder: Path) -> dict[str, str]:
        return {}

    def _command(self, folder: Path) -> list[str]:
        options = ["--really_quiet", "-C", str(self._jail_config), "-R", f"{folder}/main.py:/main.py"]
        return [self._nsjail, *options, "--", "/venv/bin/python", "/main.py"]

    def _config_text(self) -> str:
        """`nsjail.cfg` with the folders of this machine's interpreter and the environment of a program."""
        prefix = Path(self._python.prefix)
        folders = {Path(folder): folder for folder in ("/usr", "/bin", "/lib", "/lib64") if Path(folder).exists()}
        binds = {prefix: self._folder / "python"} if prefix not in folders else {}
        mounts = [
            f'mount {{ src: "{source}" dst: "{target}" is_bind: true nosuid: true nodev: true }}'
            for target, source in (folders | binds).items()
        ]
        environment = {**jail.ENVIRONMENT, "PYTHONPATH": "/opt/packages"}
        more = "\n".join([*mounts, *(f'envar: "{name}={value}"' for name, value in environment.items())])
        template = string.Template(Path(__file__).with_name("nsjail.cfg").read_text())
        return template.substitute(folder=self._folder, more=more)


def _call(program: Program) -> Call:
    limits = Limits(wall_s=program.wall_s)
    return Call(program.code, stdin=program.stdin, limits=limits, deadline_s=DEADLINE_S)


def _outcome(result: Result, latency_s: float) -> Outcome:
    status = result.status if result.blame != "infra" else f"{result.status} (infra) {result.error}".rstrip()
    return Outcome(status, result.stdout, last_line(result.stderr), latency_s)


class Zygote(Agent):
    async def __aenter__(self) -> Self:
        self._pool = await Pool(worker_config()).__aenter__()
        await self._pool.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.__aexit__()

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        return await run_each(self._run_one, programs, min(concurrency, self._pool.slots))

    async def _run_one(self, program: Program) -> Outcome:
        started, call, slot = time.perf_counter(), _call(program), self._pool.take_slot()
        try:
            while True:
                try:
                    return _outcome(await self._pool.run(call, slot, DEADLINE_S), time.perf_counter() - started)
                except ZygoteLost:
                    return Outcome("zygote lost", "", "", time.perf_counter() - started)
                except SlotBusy:
                    await asyncio.sleep(BUSY_PAUSE_S)
        finally:
            self._pool.give_back(slot)


class Http(Agent):
    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        self._client = await AsyncClient(self._url).__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        """Send all at once; the service decides how many run at a time."""
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


class Run(Agent):
    """Requests as any HTTP client sends them: `body` is the request for one program, `outcome` reads the response."""

    path = "/v1/run"
    all_in = ""  # the field of a request that has all programs; empty: one request per program

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _post(self, request: object) -> tuple[Any, float]:
        """The response and its latency."""
        started, content = time.perf_counter(), msgspec.json.encode(request)
        answer = await self._http.post(self.path, content=content, headers={"content-type": "application/json"})
        answer.raise_for_status()
        return msgspec.json.decode(answer.content), time.perf_counter() - started

    async def run(self, programs: list[Program], concurrency: int) -> list[Outcome]:
        if not self.all_in:
            return await run_each(self._run_one, programs, IN_FLIGHT * concurrency)
        answer, latency_s = await self._post({self.all_in: [self.body(program) for program in programs]})
        return [self.outcome(one, latency_s) for one in answer["results"]]

    async def _run_one(self, program: Program) -> Outcome:
        return self.outcome(*await self._post(self.body(program)))

    def body(self, program: Program) -> object:
        return _call(program)

    def outcome(self, answer: Any, latency_s: float) -> Outcome:
        return _outcome(msgspec.convert(answer, Result), latency_s)


class Batch(Run):
    path, all_in = "/v1/batch?stream=false", "calls"


class RunCode(Run):
    """SandboxFusion's endpoint."""

    path = "/run_code"

    def body(self, program: Program) -> object:
        return {"code": program.code, "language": "python", "stdin": program.stdin, "run_timeout": program.wall_s}

    def outcome(self, answer: Any, latency_s: float) -> Outcome:
        ran = answer["run_result"]
        status = _status(ran["return_code"] or 0, ran["status"] == "TimeLimitExceeded")
        return Outcome(status, ran["stdout"], last_line(ran["stderr"]), latency_s)


class LongBatch(Run):
    """code-judge's endpoint. Its protocol has no time limit per program."""

    path, all_in = "/run/long-batch", "submissions"

    def body(self, program: Program) -> object:
        return {"type": "python", "solution": program.code, "input": program.stdin}

    def outcome(self, answer: Any, latency_s: float) -> Outcome:
        reason, stderr = answer["reason"], answer["stderr"]
        failed = {"": "error", "worker_timeout": "timeout"}.get(reason, reason)
        status = "ok" if answer["run_success"] else failed
        return Outcome(status, answer["stdout"], CUT if len(stderr) == SHOWN_CHARS else last_line(stderr), latency_s)


def send_frame(stream: IO[bytes], message: Struct | bool) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive_frame(stream: IO[bytes]) -> bytes | None:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the measurement, which closes our standard input
    uvloop.run(serve(agents[kind](*rest)))


if __name__ == "__main__":
    main()
