"""What a process and all its descendants use: CPU time, dead children included, and memory without counting shared pages twice.

CPU time comes from a control group that the process is started in. v1: `cpuacct`, which the sandbox's own groups (memory, pids,
cpu) do not touch, or contain if it is mounted together with `cpu`. v2: the group has a leaf for the process, so that the
sandbox can make its groups beside that leaf and still inside. Where no group can be made: the times in /proc of what is alive,
which include those of children that were waited for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

PREFIX = "exec-bench"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CpuMeter(Protocol):
    how: str
    parent: Path | None  # the group above, if there are control groups
    procs: Path | None  # where a process id is written to be counted

    def command(self, command: list[str]) -> list[str]:
        """The command that starts `command` where it is counted."""
        ...

    def used_s(self, root_pid: int) -> float: ...

    def close(self) -> None: ...


class V1Meter:
    how = "cgroup v1 cpuacct"

    def __init__(self, parent: Path, name: str) -> None:
        self._folder = parent / name
        self._folder.mkdir()
        self.parent: Path | None = parent
        self.procs: Path | None = self._folder / "cgroup.procs"

    def command(self, command: list[str]) -> list[str]:
        return _started_in(self._folder, command)

    def used_s(self, root_pid: int) -> float:
        return int((self._folder / "cpuacct.usage").read_text()) / 1e9

    def close(self) -> None:
        _remove(self._folder)


class V2Meter:
    how = "cgroup v2 cpu.stat"

    def __init__(self, parent: Path, name: str) -> None:
        self._folder = parent / name
        self._leaf = self._folder / "own"
        self._folder.mkdir()
        self._leaf.mkdir()
        with contextlib.suppress(OSError):  # without these controllers the sandbox has no groups that could lead out
            (self._folder / "cgroup.subtree_control").write_text("+memory +pids")
        self.parent: Path | None = parent
        self.procs: Path | None = self._leaf / "cgroup.procs"

    def command(self, command: list[str]) -> list[str]:
        return _started_in(self._leaf, command)

    def used_s(self, root_pid: int) -> float:
        return int((self._folder / "cpu.stat").read_text().split()[1]) / 1e6

    def close(self) -> None:
        _remove(self._leaf)
        _remove(self._folder)


class ProcMeter:
    how = "/proc of what is alive and was waited for"
    parent: Path | None = None
    procs: Path | None = None

    def command(self, command: list[str]) -> list[str]:
        return command

    def used_s(self, root_pid: int) -> float:
        return sum(cpu_s(pid) for pid in tree(root_pid))

    def close(self) -> None:
        pass


def make_meter(name: str) -> CpuMeter:
    name = f"{PREFIX}-{os.getpid()}-{name}"
    with contextlib.suppress(OSError):
        if parent := _own_group("cgroup", "cpuacct"):
            return V1Meter(parent, name)
    with contextlib.suppress(OSError):
        if parent := _own_group("cgroup2", ""):
            return V2Meter(parent, name)
    return ProcMeter()


def remove_leftovers() -> None:
    """Groups of measurements that were killed before they could clean up."""
    for parent in filter(None, (_own_group("cgroup", "cpuacct"), _own_group("cgroup2", ""))):
        for folder in parent.glob(f"{PREFIX}-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                for group in (*folder.glob("*/"), folder):
                    with contextlib.suppress(OSError):
                        group.rmdir()


def _own_group(kind: str, controller: str) -> Path | None:
    """The folder of the group that this process is in."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, mounted_kind, options = line.split()[:4]
        if mounted_kind == kind and (not controller or controller in options.split(",")):
            return _inside(Path(where), controller)
    return None


def _inside(mount: Path, controller: str) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (mount / path.lstrip("/")).is_dir():
            return mount / path.lstrip("/")
    return mount


def _started_in(folder: Path, command: list[str]) -> list[str]:
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder / "cgroup.procs"), *command]


def _remove(folder: Path, patience_s: float = 2.0) -> None:
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        try:
            return folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the last process is just dying
            time.sleep(0.01)


def tree(root_pid: int) -> Iterator[int]:
    """A process and its descendants, in other PID namespaces too."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int(_stat(int(folder.name))[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [root_pid]
    while found:
        pid = found.pop()
        yield pid
        found += children.get(pid, [])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    try:
        return sum(map(int, _stat(pid)[11:15])) * _TICK_S  # utime stime cutime cstime
    except OSError:
        return 0.0


def pss_bytes(root_pid: int) -> int:
    return sum(map(_pss_bytes, tree(root_pid)))


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended
    return 0


def peak_bytes(pid: int) -> int:
    """The most memory that one process has had at a time."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


class OwnProcesses:
    """This process and all that it starts from now on. With a control group that includes what outlives its parent."""

    def __init__(self, name: str) -> None:
        self._meter = make_meter(name)

    def __enter__(self) -> OwnProcesses:
        if self._meter.procs is not None:
            self._meter.procs.write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter.parent is not None:
            (self._meter.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._meter.close()

    def used_s(self) -> float:
        """CPU time of all of them, also of those that have ended."""
        return self._meter.used_s(os.getpid())

    def threads(self) -> dict[tuple[int, int], float]:
        """CPU time of every thread that is alive, by process and thread."""
        return {(pid, int(thread.name)): _run_s(thread) for pid in self._pids() for thread in _threads(pid)}

    def _pids(self) -> list[int]:
        if self._meter.procs is None:
            return list(tree(os.getpid()))
        folder = self._meter.procs.parent if isinstance(self._meter, V1Meter) else self._meter.procs.parents[1]
        pids = []
        for procs in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # the group has just been removed
                pids += [int(pid) for pid in procs.read_text().split()]
        return pids


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _run_s(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def thread_name(pid: int, thread: int) -> str:
    """In words: what was started, and its thread."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
    except OSError:
        return f"process {pid}, which has ended"
    words = " ".join(Path(word).name for word in command[:4]).strip()
    return f"{words[:60]} (process {pid}, thread {name})"


def machine_s() -> tuple[float, float]:
    """CPU time of all cores since the machine was started: what was used, and what its host gave to others meanwhile."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S


def machine_busy_s() -> float:
    return sum(machine_s())


def others_share(busy_before_s: float, ours_s: float, wall_s: float) -> float:
    """Of the machine's cores, used by what is not ours since `machine_busy_s` said `busy_before_s`."""
    return max(0.0, machine_busy_s() - busy_before_s - ours_s) / wall_s / (os.cpu_count() or 1)
