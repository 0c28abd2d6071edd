"""A real `exec-service up` in a process of its own, and a look at what it has on the machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from common import PATIENCE_S, until, wait_until
from sandbox_harness import OWN_BASE, cgroups_of, children_of, host_mounts, is_alive, need_sandbox, tree_of, uid_of

from exec_wire import Result
from exec_wire.messages.calls import decode_result
from worker.sandbox.uids import BLOCK_SIZE, STATE_FOLDER, processes_of

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "exec_service"]
UP = ["up", "--port", "0", "--grpc-port", "0"]
QUICK = {"slots": 2, "profiles": '{"bare": []}', "log_format": "text"}
JSON = {"content-type": "application/json"}
# Greeted, or told why nothing can be run; in both cases the address is in the words.
_STARTED = re.compile(r"(?:ready on|documentation at) (http://[0-9.:]+)")


def environment(**settings: object) -> dict[str, str]:
    """This process's variables without settings of the service, and those that are given, by their names in small letters."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("EXEC_")}
    return own | {f"EXEC_{name.upper()}": str(value) for name, value in ({"uid_base": OWN_BASE} | settings).items()}


def command(*arguments: str, stdin: str = "", timeout_s: float = 60, **settings: object) -> subprocess.CompletedProcess[str]:
    """`exec-service ARGUMENTS`, to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=environment(**settings),
    )


class Service:
    """A started service; `block` names the uids, control groups and folder that it holds."""

    def __init__(self, arguments: Sequence[str], command: Sequence[str] = COMMAND, **settings: object) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.process = subprocess.Popen(
            [*command, *UP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            cwd=ROOT,
            env=environment(**(QUICK | settings)),
            start_new_session=True,
        )
        try:
            self.url = self._await_start()
            self.http = httpx.Client(base_url=self.url, timeout=60)
        except BaseException:
            self._end()
            raise

    def _await_start(self) -> str:
        wait_until(lambda: _STARTED.search(self.words) or self.process.poll() is not None, lambda: self.words, 60)
        started = _STARTED.search(self.words)
        assert started, f"the service did not start ({self.process.returncode}):\n{self.words}"
        return started[1]

    @property
    def words(self) -> str:
        """What it has said on stderr."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode()

    def run(self, code: str, **fields: Any) -> Result:
        answer = self.http.post("/v1/run", json={"code": code, **fields})
        assert answer.status_code == 200, answer.text
        return decode_result(answer.content)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)

    # -- its processes ----------------------------------------------------------------------------------------------------

    @property
    def runner_pid(self) -> int:
        return next(pid for pid in children_of(self.process.pid) if b"worker.sandbox.runner" in _cmdline(pid))

    @property
    def nsjail_pids(self) -> list[int]:
        """None while a runner that died has no successor."""
        runners = [pid for pid in children_of(self.process.pid) if b"worker.sandbox.runner" in _cmdline(pid)]
        return [nsjail for runner in runners for nsjail in children_of(runner)]

    @property
    def zygote_pids(self) -> list[int]:
        return [zygote for nsjail in self.nsjail_pids for zygote in children_of(nsjail)]

    @property
    def tree(self) -> list[int]:
        return tree_of(self.process.pid)

    @property
    def block(self) -> int:
        """Its first uid, from the lock that its runner holds."""
        for fd in Path(f"/proc/{self.runner_pid}/fd").iterdir():
            if held := re.fullmatch(rf"{STATE_FOLDER}/uids-(\d+)\.lock", str(fd.readlink())):
                return int(held[1])
        raise AssertionError("the runner holds no block of uids")

    @property
    def program_pids(self) -> list[int]:
        return programs_of(self.block)

    # -- its end ----------------------------------------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        return self.process.wait(patience_s)

    def close(self) -> None:
        self.http.close()
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._stderr.close()


@contextlib.contextmanager
def serving(*arguments: str, command: Sequence[str] = COMMAND, **settings: object) -> Iterator[Service]:
    """Until the end of the block; settings by their names in small letters. Started means greeted, or refused with words."""
    need_sandbox()
    service = Service(arguments, command, **settings)
    try:
        yield service
    finally:
        service.close()


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def programs_of(block: int) -> list[int]:
    """What runs under the uid of a slot."""
    return list(processes_of(range(block + 1, block + BLOCK_SIZE)))


def slots_in_use(block: int) -> set[int]:
    """The uids under which programs run."""
    uids = set()
    for pid in programs_of(block):
        with contextlib.suppress(OSError):  # it ended meanwhile
            uids.add(uid_of(pid))
    return uids


def left_of(block: int, pids: list[int]) -> list[str]:
    """What a service that is gone still has on the machine; `pids` are those it was seen with."""
    left = [f"process {pid} of its tree" for pid in pids if is_alive(pid)]
    left += [f"process {pid} of its uids" for pid in processes_of(range(block, block + BLOCK_SIZE))]
    left += [f"control group {folder}" for folder in cgroups_of(block)]
    folder = STATE_FOLDER / f"exec-service-{block}"
    left += [f"folder {folder}"] * folder.exists()
    left += [f"mount {where}" for where in host_mounts() if str(block) in where]
    return left


def see_nothing_left(block: int, pids: list[int], patience_s: float = 30.0) -> None:
    """A killed process needs a moment."""
    wait_until(lambda: not left_of(block, pids), lambda: f"still there: {', '.join(left_of(block, pids))}", patience_s, 0.05)


async def until_program_runs(service: Service, count: int = 1) -> None:
    await until(lambda: len(slots_in_use(service.block)) >= count, f"{count} programs run")


async def until_no_program_runs(service: Service, patience_s: float = 30.0) -> None:
    await until(lambda: not service.program_pids, "no program runs", patience_s)


# -- programs with a known end --------------------------------------------------------------------------------------------


class Case:
    """A call, and what its result must say."""

    def __init__(self, call: dict[str, Any], **expected: Any) -> None:
        self.call, self.expected = call, expected

    def problem(self, result: Result) -> str:
        found = {name: getattr(result, name) for name in self.expected}
        return "" if found == self.expected else f"{self.call}: expected {self.expected}, got {result}"


def mixed_case(number: int) -> Case:
    """Of nine kinds, the same one for the same number, each with an output of its own."""
    n = number
    makers = [
        lambda: Case({"code": f"print({n} * 7)"}, status="ok", stdout=f"{n * 7}\n", exit_code=0),
        lambda: Case({"code": "print(sum(map(int, input().split())))", "stdin": f"{n} 1 2"}, status="ok", stdout=f"{n + 3}\n"),
        lambda: Case(
            {"code": f"import numpy as np\nprint(np.arange({n % 50}).sum())"}, status="ok", stdout=f"{sum(range(n % 50))}\n"
        ),
        lambda: Case(
            {"code": f"import sys\nprint({n}, file=sys.stderr)\nsys.exit({n % 100 + 1})"},
            status="error",
            blame="model",
            exit_code=n % 100 + 1,
            stderr=f"{n}\n",
        ),
        lambda: Case({"code": f"print({n})\n1 / 0"}, status="error", blame="model", stdout=f"{n}\n", exit_code=1),
        lambda: Case({"code": f"{n} + 1", "echo_value": True}, status="ok", value=str(n + 1), stdout=""),
        lambda: Case(
            {"code": f"open('out', 'w').write('{n}' * 3)", "fetch_files": ["out"]},
            status="ok",
            files={"out": _base64(f"{n}" * 3)},
        ),
        lambda: Case(
            {"code": "import os\nos.kill(os.getpid(), 11)"}, status="signal", blame="model", signal=11, exit_code=None
        ),
        lambda: Case(
            {"code": f"import os\nif os.fork() == 0:\n    print({n}, flush=True)\n    os._exit(0)\nos.wait()\nprint('end')"},
            status="ok",
            stdout=f"{n}\nend\n",
        ),
    ]
    return makers[number % len(makers)]()


def _base64(text: str) -> str:
    import base64

    return base64.b64encode(text.encode()).decode()
