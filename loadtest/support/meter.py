"""What a process and all its descendants use: CPU time, ended children included, and memory with shared pages counted once.

The process is started in a control group, which counts its CPU time. v1: `cpuacct`; the groups of the sandbox (memory, pids,
cpu) do not touch it, or are inside it where it is mounted together with `cpu`. v2: the process is in a leaf of the group, so
that the groups of the sandbox are made beside that leaf and still inside. Without control groups: the times in /proc of living
processes, which include the children they waited for.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

PREFIX = "exec-bench"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Counts through /proc; the classes below count through a control group."""

    how = "/proc of processes that live or were waited for"
    parent: Path | None = None  # the group above
    group: Path | None = None
    procs: Path | None = None  # a process id written here is counted

    def command(self, command: list[str]) -> list[str]:
        """The command that starts `command` inside the meter."""
        return command

    def used_s(self, root_pid: int) -> float:
        return sum(cpu_s(pid) for pid in tree(root_pid))

    def close(self) -> None:
        pass


class GroupMeter(CpuMeter):
    def __init__(self, parent: Path, name: str, leaf: str = "") -> None:
        self._group, self._own = parent / name, parent / name / leaf
        self._own.mkdir(parents=True)
        self.parent, self.group, self.procs = parent, self._group, self._own / "cgroup.procs"

    def command(self, command: list[str]) -> list[str]:
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.procs), *command]

    def close(self) -> None:
        for folder in dict.fromkeys((self._own, self._group)):
            _remove(folder)


class V1Meter(GroupMeter):
    how = "cgroup v1 cpuacct"

    def used_s(self, root_pid: int) -> float:
        return int((self._group / "cpuacct.usage").read_text()) / 1e9


class V2Meter(GroupMeter):
    how = "cgroup v2 cpu.stat"

    def __init__(self, parent: Path, name: str) -> None:
        super().__init__(parent, name, "own")
        with contextlib.suppress(OSError):  # without these controllers the sandbox makes no groups outside this one
            (self._group / "cgroup.subtree_control").write_text("+memory +pids")

    def used_s(self, root_pid: int) -> float:
        return int((self._group / "cpu.stat").read_text().split()[1]) / 1e6


def make_meter(name: str) -> CpuMeter:
    name = f"{PREFIX}-{os.getpid()}-{name}"
    with contextlib.suppress(OSError):
        if parent := own_group("cgroup", "cpuacct"):
            return V1Meter(parent, name)
    with contextlib.suppress(OSError):
        if parent := own_group("cgroup2", ""):
            return V2Meter(parent, name)
    return CpuMeter()


def remove_leftovers() -> None:
    """Remove the groups of measurements that were killed before they could clean up."""
    for parent in filter(None, (own_group("cgroup", "cpuacct"), own_group("cgroup2", ""))):
        for folder in parent.glob(f"{PREFIX}-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                for group in (*folder.glob("*/"), folder):
                    with contextlib.suppress(OSError):
                        group.rmdir()


def own_group(kind: str, controller: str) -> Path | None:
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


def _remove(folder: Path, patience_s: float = 2.0) -> None:
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        try:
            return folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # the last process is still exiting
            time.sleep(0.01)


def tree(root_pid: int) -> Iterator[int]:
    """A process and its descendants, also in other PID namespaces."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if stat := _stat(int(folder.name)):
            children.setdefault(int(stat[1]), []).append(int(folder.name))
    found = [root_pid]
    while found:
        pid = found.pop()
        yield pid
        found += children.get(pid, [])


def proc_text(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain anything."""
    return proc_text(pid, "stat").rpartition(")")[2].split()


def cpu_s(pid: int) -> float:
    return sum(map(int, _stat(pid)[11:15])) * _TICK_S  # utime stime cutime cstime


def stages_s(stages: dict[str, list[int]]) -> dict[str, float]:
    """CPU time by stage, each stage a list of processes."""
    return {name: sum(map(cpu_s, pids)) for name, pids in stages.items()}


def memory_bytes(pid: int, field: str, file: str = "status") -> int:
    """Such as VmRSS, the resident memory, or VmHWM, its peak; 0 if the process has ended."""
    found = re.search(rf"^{field}:\s+(\d+)", proc_text(pid, file), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def pss_bytes(root_pid: int) -> int:
    return sum(memory_bytes(pid, "Pss", "smaps_rollup") for pid in tree(root_pid))


class OwnProcesses:
    """This process and all that it starts from now on. A control group includes processes that outlive their parent."""

    def __init__(self, name: str) -> None:
        self._meter = make_meter(name)

    def __enter__(self) -> Self:
        if self._meter.procs is not None:
            self._meter.procs.write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._meter.parent is not None:
            (self._meter.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._meter.close()

    def used_s(self) -> float:
        """CPU time of all of them, ended ones included."""
        return self._meter.used_s(os.getpid())

    def threads(self) -> dict[tuple[int, int], float]:
        """CPU time of every living thread, by process and thread."""
        threads = [(pid, thread) for pid in self._pids() for thread in _threads(pid)]
        run = {one: proc_text(one[0], f"task/{one[1]}/schedstat").split() for one in threads}
        return {(pid, int(thread)): int(found[0]) / 1e9 for (pid, thread), found in run.items() if found}

    def _pids(self) -> list[int]:
        if self._meter.group is None:
            return list(tree(os.getpid()))
        pids = []
        for procs in self._meter.group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # the group has just been removed
                pids += [int(pid) for pid in procs.read_text().split()]
        return pids


def _threads(pid: int) -> list[str]:
    try:
        return [thread.name for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def thread_name(pid: int, thread: int) -> str:
    """Its command and thread name, for a report."""
    command = proc_text(pid, "cmdline").split("\0")
    words = " ".join(Path(word).name for word in command[:4]).strip()
    return f"{words[:60]} (process {pid}, thread {proc_text(pid, f'task/{thread}/comm').strip() or 'ended'})"


def machine_busy_s() -> float:
    """CPU time of all cores since the start of the machine, time stolen by its host included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def others_share(busy_before_s: float, ours_s: float, wall_s: float) -> float:
    """The share of the cores that other processes used since `machine_busy_s` returned `busy_before_s`."""
    return max(0.0, machine_busy_s() - busy_before_s - ours_s) / wall_s / (os.cpu_count() or 1)
