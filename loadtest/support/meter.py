"""What a process and all its descendants use: CPU time, ended children included, and memory with shared pages counted once.

The process is started in a control group, which counts its CPU time. v1: `cpuacct`; the groups of the sandbox (memory, pids,
cpu) do not touch it, or are inside it where it is mounted together with `cpu`. v2: the process is in a leaf of the group, so
that the groups of the sandbox are made beside that leaf and still inside. Without control groups: the times in /proc of living
processes, which include the children they waited for.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from worker.sandbox import cgroups

PREFIX = "exec-bench"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Counts through /proc; the classes below count through a control group."""

    how = "/proc of processes that live or were waited for"
    parent: Path | None = None  # the group above
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
        self._group, self.parent, self.procs = parent / name, parent, parent / name / leaf / "cgroup.procs"
        self.procs.parent.mkdir(parents=True)

    def command(self, command: list[str]) -> list[str]:
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.procs), *command]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a process does not end
            cgroups.remove_tree(self._group)


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
    for controller, kind in (("cpuacct", V1Meter), ("", V2Meter)):
        with contextlib.suppress(OSError):
            if parent := own_group(controller):
                return kind(parent, name)
    return CpuMeter()


def remove_leftovers() -> None:
    """Remove the groups of measurements that were killed before they could clean up."""
    for parent in filter(None, (own_group("cpuacct"), own_group(""))):
        for folder in parent.glob(f"{PREFIX}-*-*"):
            if not Path("/proc", folder.name.split("-")[2]).exists():
                with contextlib.suppress(OSError):
                    cgroups.remove_tree(folder, 0.0)


def own_group(controller: str) -> Path | None:
    """The folder of the group that this process is in. `controller`: of version 1; empty for version 2."""
    return cgroups.hierarchies().get(controller, (None, None))[1]


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


@contextlib.contextmanager
def own_processes(name: str) -> Iterator[Callable[[], float]]:
    """A function for the CPU time of this process and of all that it starts from now on, ended ones included.

    A control group includes processes that outlive their parent.
    """
    cpu, own = make_meter(name), str(os.getpid())
    if cpu.procs is not None:
        cpu.procs.write_text(own)
    try:
        yield lambda: cpu.used_s(os.getpid())
    finally:
        if cpu.parent is not None:
            (cpu.parent / "cgroup.procs").write_text(own)
        cpu.close()


def machine_busy_s() -> float:
    """CPU time of all cores since the start of the machine, time stolen by its host included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def others_share(busy_before_s: float, ours_s: float, wall_s: float) -> float:
    """The share of the cores that other processes used since `machine_busy_s` returned `busy_before_s`."""
    return max(0.0, machine_busy_s() - busy_before_s - ours_s) / wall_s / (os.cpu_count() or 1)
