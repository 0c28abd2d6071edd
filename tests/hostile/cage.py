"""Hostile programs in a pool of their own: alone, or as copies beside a canary; and the machine's state when they are dead."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import platform
import re
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from corpus import Program, judge
from sandbox_harness import canary_song, cgroups_of, host_mounts, open_fds, processes_in, tree_of

from exec_wire import Call, Limits, Result, verdict
from exec_wire.messages.sessions import Cell, Create, Did, End, FetchFiles, Got, Ran, RunCell, SessionSpec, Told
from worker import languages
from worker.config import WorkerConfig
from worker.pool import Pool, SlotBusy
from worker.profiles import PROFILES
from worker.sandbox.runner import SLOTS_PER_ZYGOTE
from worker.sandbox.session_tree import GRACE_S
from worker.sandbox.uids import BLOCK_SIZE, processes_of
from worker.sandbox.zygote_client import ZygoteLost
from worker.sessions import Sessions

COPIES = 8
DEADLINE_S = 300.0
CLEAN_WITHIN_S = 30.0  # what was killed is dead by then
_ATTACK = base64.b64encode((Path(__file__).parent / "attack.py").read_bytes()).decode()
_USES_ATTACK = re.compile(r"^(from|import) attack\b", re.M)

CANARY = """
import hashlib, os
assert os.listdir(".") == []
digest = b""
for i in range(20000):
    digest = hashlib.sha256(digest + b"%d" % i).digest()
open("mark", "w").write(digest.hex())
print(open("mark").read())
"""
CANARY_LIMITS = Limits(wall_s=10, cpu_s=10, memory_mb=64)

# What a program finds before it has done anything. Without a mount namespace there is only the one folder.
LOOK = """
import os
places = ["/tmp", "/dev/shm", "/mnt"] if "JAIL" in os.environ else ["."]
found = [f"{place}/{name}" for place in places for name in os.listdir(place)]
if "JAIL" in os.environ:
    found += [f"/w/call/{name}" for name in os.listdir("/w/call") if name not in ("tmp", "shm", "mnt", "main.py")]
    found += [f"process {name}" for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    found += [] if os.stat("/w").st_mode & 0o7777 == os.stat("/dev").st_mode & 0o7777 == 0o755 else ["modes of shared folders"]
    open("/dev/null", "w").write("x")
print(*found or ["contained"])
"""
LOOK_LIMITS = Limits(wall_s=10, memory_mb=128)
LOOK_IN_SESSION = """
import os
places = ["/tmp", "/dev/shm", ".", os.environ["TMPDIR"]] if "JAIL" in os.environ else ["."]
found = [f"{place}/{name}" for place in places for name in os.listdir(place)]
if "JAIL" in os.environ:
    found += [f"/mnt/{name}" for name in os.listdir("/mnt") if name != "0"]
    found += [f"process {name}" for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
print(*found or ["contained"])
"""


@dataclass
class Canary:
    """A correct program that runs again and again; its output must stay right, and its latencies are kept."""

    latencies_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        slowest = sorted(1000 * latency for latency in self.latencies_s)
        at = {name: slowest[int(share * (len(slowest) - 1))] for name, share in (("median", 0.5), ("p99", 0.99), ("most", 1))}
        return ", ".join(f"{name} {milliseconds:.0f} ms" for name, milliseconds in at.items())


@dataclass
class Node:
    """What must be the same after a program as before it. Where a plain user may not look, there is nothing."""

    processes: set[int]
    mounts: dict[str, list[str]]
    descriptors: dict[int, int]
    in_cgroups: list[int]
    of_sandbox_uids: list[int]

    def differences(self, before: Node) -> list[str]:
        found = []
        if more := self.processes - before.processes:
            found.append(f"processes {sorted(more)} are left")
        if less := before.processes - self.processes:
            found.append(f"processes {sorted(less)} of the sandbox itself are gone")
        for whose, mounts in self.mounts.items():
            if mounts != before.mounts.get(whose, mounts):
                found.append(f"mounts of {whose}: {sorted(set(mounts) ^ set(before.mounts[whose]))}")
        for pid, count in self.descriptors.items():
            if count != before.descriptors.get(pid, count):
                found.append(f"process {pid} has {count} descriptors, had {before.descriptors[pid]}")
        if self.in_cgroups:
            found.append(f"processes {self.in_cgroups} are in the slots' control groups")
        if self.of_sandbox_uids:
            found.append(f"processes {self.of_sandbox_uids} have the uid of a slot")
        return found


class Cage:
    def __init__(self, pool: Pool, programs: dict[str, Program], sessions: Sessions) -> None:
        self.pool, self.programs, self.sessions = pool, programs, sessions
        self.sandbox = pool.sandbox
        self.features = _features(pool)
        self.canary = Canary()
        self._told: set[str] = set()
        self._slots = asyncio.Queue[int]()
        self._taking = asyncio.Lock()
        for slot in sorted(pool.take_slot() for _ in range(pool.free_slots)):
            self._slots.put_nowait(slot)
        self._runner_pid = pool._runner._process.pid if pool._runner._process else 0
        self._uid_base = _uid_base(self._runner_pid)

    def lacking(self, program: Program) -> str:
        return program.lacking(self.sandbox, self.features)

    @property
    def partners(self) -> set[str]:
        """Programs that run only with another."""
        return {name for program in self.programs.values() for name in (program.pair, program.after) if name}

    # -- running ----------------------------------------------------------------------------------------------------------

    async def run_alone(self, program: Program, crowd: bool = False) -> tuple[list[str], Result]:
        """Run a program and its partners. Returns the problems and its result. `crowd`: while other programs run."""
        wrong, result = await self._run_set(program, crowd)
        if program.expect.differs:
            again, second = await self._run_set(program, crowd)
            wrong += again + ([f"twice the same: {result.stdout!r}"] if result.stdout == second.stdout else [])
        return wrong, result

    async def run_crowd(self, program: Program) -> tuple[list[str], list[Result]]:
        """As 8 copies, or 4 with their siblings, beside the canary."""
        return await self._crowd(program, lambda: self._run_set(program, crowd=True), self._sing)

    async def _crowd(
        self,
        program: Program,
        run: Callable[[], Awaitable[tuple[list[str], Result]]],
        beside: Callable[[int, asyncio.Event], Awaitable[object]],
    ) -> tuple[list[str], list[Result]]:
        """Run many copies, and `beside` in a slot of its own until they have ended."""
        stop = asyncio.Event()
        async with self._take_slots(1) as (canary_slot,):
            singing = asyncio.ensure_future(beside(canary_slot, stop))
            ends = await asyncio.gather(*(run() for _ in range(COPIES // 2 if program.pair else COPIES)))
            stop.set()
            await singing
        wrong = [words for problems, _ in ends for words in problems]
        results = [result for _, result in ends]
        if program.expect.differs and len({result.stdout for result in results}) < len(results):
            wrong.append("not all printed something else")
        return wrong, results

    async def _run_set(self, program: Program, crowd: bool) -> tuple[list[str], Result]:
        async with self._take_slots(2 if program.pair else 1) as (slot, *other):
            wrong = [words for one in self._earlier(program) for words in await self._judged(one, slot, crowd)]
            pair = [self._judged(self.programs[program.pair], other[0], crowd)] if program.pair else []
            result, *siblings = await asyncio.gather(self.run_in(program, slot, crowd), *pair)
        return sum(siblings, wrong) + judge(program, result, crowd=crowd), result

    def _earlier(self, program: Program) -> list[Program]:
        """What ran before it in the same slot, in order."""
        if not program.after:
            return []
        last = self.programs[program.after]
        return [*self._earlier(last), last]

    async def _judged(self, program: Program, slot: int, crowd: bool) -> list[str]:
        result = await self.run_in(program, slot, crowd)
        return [f"{program.name}: {words}" for words in judge(program, result, crowd=crowd)]

    async def run_in(self, program: Program, slot: int, crowd: bool = False) -> Result:
        files = {"attack.py": _ATTACK} if _USES_ATTACK.search(program.code) else {}
        with _bait(program) as (bait, was_touched):
            call = Call(
                code=program.code,
                language=program.language,
                stdin=program.stdin,
                files=files,
                fetch_files=list(program.fetch),
                limits=program.limits_in(crowd),
                env=program.env | bait,
            )
            result = await self._run(call, slot)
            if words := was_touched():
                result.stdout += f"\nescaped: {words}\n"
            return result

    # -- as cells ---------------------------------------------------------------------------------------------------------

    def lend_slots(self) -> None:
        """Give the pool all slots but one, the canary's: cells take their slots themselves."""
        for _ in range(self._slots.qsize() - 1):
            self.pool.give_back(self._slots.get_nowait())

    async def run_cell(self, program: Program, crowd: bool = False) -> tuple[list[str], Result]:
        """The same as a cell of a session of its own, which is ended afterwards. What ran before it did so in another one."""
        wrong = [words for one in self._earlier(program) for words in await self._judged_cell(one, crowd)]
        pair = [self._judged_cell(self.programs[program.pair], crowd)] if program.pair else []
        own, *siblings = await asyncio.gather(self._run_cell(program, crowd), *pair)
        return sum(siblings, wrong) + judge(program.as_cell(), own, crowd=crowd, grace_s=GRACE_S), own

    async def run_cells_crowd(self, program: Program) -> tuple[list[str], list[Result]]:
        """As cells of 8 sessions, or of 4 and 4 for siblings, beside the canary and a session that must keep its state."""
        return await self._crowd(
            program,
            lambda: self.run_cell(program, crowd=True),
            lambda slot, stop: asyncio.gather(self._sing(slot, stop), self._count(stop)),
        )

    async def _judged_cell(self, program: Program, crowd: bool) -> list[str]:
        result = await self._run_cell(program, crowd)
        return [f"{program.name}: {words}" for words in judge(program.as_cell(), result, crowd=crowd, grace_s=GRACE_S)]

    async def _count(self, stop: asyncio.Event) -> None:
        """A session whose variable grows by one with each cell, whatever the others do."""
        id = await self._session(SessionSpec(limits=CANARY_LIMITS))
        for number in itertools.count():
            began = time.monotonic()
            ran = await self.sessions.handle(RunCell(id, Cell("n = n + 1 if 'n' in globals() else 0\nn")), DEADLINE_S)
            self.canary.latencies_s.append(time.monotonic() - began)
            if not isinstance(ran, Ran) or ran.result.value != str(number):
                self.canary.wrong.append(f"the session's cell {number}: {ran}")
                break
            if stop.is_set():
                break
            await asyncio.sleep(0.01)
        await self.sessions.handle(End(id, ""), DEADLINE_S)

    async def look_in_session(self) -> list[str]:
        """What a new session finds before it has done anything."""
        env = {"JAIL": "1"} if "mntns" in self.sandbox.layers else {}
        id = await self._session(SessionSpec(limits=LOOK_LIMITS, env=env))
        ran = await self.sessions.handle(RunCell(id, Cell(LOOK_IN_SESSION)), DEADLINE_S)
        await self.sessions.handle(End(id, ""), DEADLINE_S)
        if isinstance(ran, Ran) and (ran.result.status, ran.result.stdout) == ("ok", "contained\n"):
            return []
        return [f"a new session: {ran}"]

    async def _session(self, spec: SessionSpec) -> str:
        told = await self.sessions.handle(Create(spec), DEADLINE_S)
        if not isinstance(told, Told):
            raise AssertionError(f"no session can be had: {told}")
        return told.sessions[0].id

    async def _run_cell(self, program: Program, crowd: bool) -> Result:
        with _bait(program) as (bait, was_touched):
            files = {"attack.py": _ATTACK} if _USES_ATTACK.search(program.code) else {}
            spec = SessionSpec(limits=program.limits_in(crowd), env=program.env | bait, files=files)
            try:
                id = await self._session(spec)
            except AssertionError as error:
                return verdict("internal_error", error=str(error), sandbox=self.sandbox)
            ran = await self.sessions.handle(RunCell(id, Cell(program.code, stdin=program.stdin)), DEADLINE_S)
            result = ran.result if isinstance(ran, Ran) else verdict("internal_error", error=str(ran))
            result.sandbox = self.sandbox
            if program.fetch:
                got = await self.sessions.handle(FetchFiles(id, list(program.fetch), ""), DEADLINE_S)
                result.files = got.files if isinstance(got, Got) else {}
            if (ended := await self.sessions.handle(End(id, ""), DEADLINE_S)) != Did(True):
                result.stdout += f"\nescaped: its session does not end: {ended}\n"
            if words := was_touched():
                result.stdout += f"\nescaped: {words}\n"
            return result

    async def _run(self, call: Call, slot: int) -> Result:
        give_up = time.monotonic() + CLEAN_WITHIN_S
        while True:
            try:
                return await self.pool.run(call, slot, DEADLINE_S)
            except SlotBusy:
                if time.monotonic() > give_up:
                    return verdict("internal_error", error="the slot stays busy", sandbox=self.sandbox)
                await asyncio.sleep(0.02)
            except ZygoteLost:
                return verdict("worker_lost", error="the zygote died", sandbox=self.sandbox)

    async def _sing(self, slot: int, stop: asyncio.Event) -> None:
        right = canary_song()
        while True:
            began = time.monotonic()
            result = await self._run(Call(code=CANARY, limits=CANARY_LIMITS), slot)
            self.canary.latencies_s.append(time.monotonic() - began)
            if (result.status, result.stdout, result.stderr) != ("ok", right, ""):
                self.canary.wrong.append(f"{result.status} {result.error} {result.stdout[-80:]!r} {result.stderr[-200:]!r}")
            if stop.is_set():
                return
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def _take_slots(self, count: int) -> AsyncIterator[list[int]]:
        async with self._taking:  # all or none: two that hold one each would wait for ever
            slots = [await self._slots.get() for _ in range(count)]
        try:
            yield slots
        finally:
            for slot in slots:
                self._slots.put_nowait(slot)

    # -- the machine ------------------------------------------------------------------------------------------------------

    def look(self) -> Node:
        tree = tree_of(self._runner_pid)
        cached = len(self.pool._compiled._programs)  # compiled programs, kept on purpose
        block = range(self._uid_base + 1, self._uid_base + BLOCK_SIZE) if self._uid_base else range(0)
        return Node(
            set(tree),
            {"the host": host_mounts()} | {f"process {pid}": mounts for pid in tree if (mounts := _mounts(pid))},
            {pid: count for pid in tree if (count := _descriptors(pid))} | {os.getpid(): _descriptors(os.getpid()) - cached},
            processes_in(cgroups_of(self._uid_base)) if self._uid_base else [],
            list(processes_of(block)) if block else [],
        )

    async def look_at_rest(self) -> Node:
        """When what ran last has gone: the first look that is the same as the one before it."""
        before = self.look()
        while True:
            await asyncio.sleep(0.3)
            now = self.look()
            if not now.differences(before):
                return now
            before = now

    async def differences(self, before: Node) -> list[str]:
        """Describes what differs from the state before, after the time that killed processes need to die."""
        give_up = time.monotonic() + CLEAN_WITHIN_S
        while found := self.look().differences(before):
            if time.monotonic() > give_up:
                return found
            await asyncio.sleep(0.02)
        return []

    async def leftovers(self) -> list[str]:
        """What the next program finds in each slot, without problems that were reported before."""
        env = {"JAIL": "1"} if "mntns" in self.sandbox.layers else {}
        found = []
        for slot in range(self.pool.slots):
            result = await self._run(Call(code=LOOK, env=env, limits=LOOK_LIMITS), slot)
            if (result.status, result.stdout) != ("ok", "contained\n"):
                found.append(f"slot {slot}: {result.status} {result.error} {result.stdout[-200:]} {result.stderr[-200:]}")
        new = [words for words in found if words not in self._told]
        self._told.update(found)
        return new


@asynccontextmanager
async def caged(programs: dict[str, Program], slots: int, mask: list[str]) -> AsyncIterator[Cage]:
    """Never in a tier below D: some programs would do harm there, and nothing is promised."""
    if os.geteuid() == 0 and "uid" in mask and set(mask) & {"userns", "pidns", "mntns", "ipcns", "utsns", "netns"}:
        raise ValueError("root, without a uid for each program and without a jail: hostile programs are not run like that")
    config = WorkerConfig(
        slots=slots, profiles={name: PROFILES[name] for name in ("bare", "numpy")}, mask_layers=mask, min_tier="D"
    )
    async with Pool(config) as pool, Sessions("cage", pool) as sessions:
        async with asyncio.timeout(60):
            await pool.wait_ready()
            wanted = len(pool.profiles) * max(1, slots // SLOTS_PER_ZYGOTE)
            while sum(zygote.ready for zygote in pool._zygotes) < wanted:  # noqa: ASYNC110 - it happens in other processes
                await asyncio.sleep(0.05)
        cage = Cage(pool, programs, sessions)
        for slot in [*range(slots)] * 2:  # whatever a first run opens is open afterwards
            await cage._run(Call(code="pass"), slot)
        yield cage


def _features(pool: Pool) -> set[str]:
    found = {platform.machine(), *languages.paths()}
    if "cgroup" in pool.sandbox.layers and any(" cgroup " in line and "cpu" in line for line in _mount_lines()):
        found.add("cpu_shares")
    return found


def _mount_lines() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def _uid_base(runner_pid: int) -> int:
    """The first uid of the block that a runner holds; 0 if it holds none."""
    try:
        links = [str(fd.readlink()) for fd in Path(f"/proc/{runner_pid}/fd").iterdir()]
    except OSError:
        return 0
    return next((int(found[1]) for link in links if (found := re.search(r"uids-(\d+)\.lock", link))), 0)


def _mounts(pid: int) -> list[str]:
    try:
        return sorted(line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    except OSError:
        return []


def _descriptors(pid: int) -> int:
    try:
        return open_fds(pid)
    except OSError:
        return 0


@contextmanager
def _bait(program: Program) -> Iterator[tuple[dict[str, str], Callable[[], str]]]:
    """A file, two sockets and a process of the host (this one), whose names a program gets and that it must not reach."""
    if not program.bait:
        yield {}, lambda: ""
        return
    with (
        tempfile.TemporaryDirectory(prefix="bait-") as name,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        file = folder / "file"
        file.write_text("BAIT")
        file.chmod(0o666)
        for bound, path in ((ear, folder / "datagrams"), (door, folder / "stream")):
            bound.bind(str(path))
            path.chmod(0o777)
            bound.setblocking(False)
        door.listen()
        before = file.stat()
        signals: list[int] = []
        signal.signal(signal.SIGURG, lambda number, _: signals.append(number))

        def was_touched() -> str:
            words = []
            now = file.stat()
            if (now.st_mtime_ns, now.st_mode, file.read_text()) != (before.st_mtime_ns, before.st_mode, "BAIT"):
                words.append("a file of the host was changed")
            if sorted(path.name for path in folder.iterdir()) != ["datagrams", "file", "stream"]:
                words.append("a folder of the host was changed")
            if signals:
                words.append("a process of the host got a signal")
            for bound, take in ((ear, lambda: ear.recv(1)), (door, door.accept)):
                try:
                    take()
                    words.append(f"a socket of the host was reached ({bound.type.name})")
                except BlockingIOError:
                    pass
            return "; ".join(words)

        yield {"BAIT": str(folder), "BAIT_PID": str(os.getpid())}, was_touched
