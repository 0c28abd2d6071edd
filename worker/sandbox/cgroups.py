"""A control group per slot, version 1 or 2: the kernel limits and counts memory and processes.

The runner makes the groups once and opens their files; zygotes get the descriptors and never see the file system.
"""

import contextlib
import errno
import os
import time
from pathlib import Path

# The order and meaning of a slot's descriptors, as in native/protocol.h: limit, peak, events, pids limit, pids now, CPU usage,
# threads, attach...
# The mode; of version 1 the controller and the file; the file of version 2.
_FILES = [
    (os.O_WRONLY, "memory", "memory.limit_in_bytes", "memory.max"),
    (os.O_RDWR, "memory", "memory.max_usage_in_bytes", "memory.peak"),
    (os.O_RDONLY, "memory", "memory.oom_control", "memory.events"),
    (os.O_WRONLY, "pids", "pids.max", "pids.max"),
    (os.O_RDONLY, "pids", "pids.current", "pids.current"),
    (os.O_RDONLY, "cpuacct", "cpuacct.usage", "cpu.stat"),
    (os.O_RDONLY, "cpuacct", "tasks", "cgroup.threads"),
]
# Memory in use, CPU time used, kills for lack of memory.
_COUNTERS = [
    (os.O_RDONLY, "memory", "memory.usage_in_bytes", "memory.current"),
    (os.O_RDONLY, "cpuacct", "cpuacct.usage", "cpu.stat"),
    (os.O_RDONLY, "memory", "memory.oom_control", "memory.events"),
]
_PEAK = 1
REQUIRED = {1: ("memory", "pids", "cpuacct"), 2: ("memory", "pids")}  # version 2 counts CPU time without a controller
FIRST_LEAF = "leaf0"
PROCESSES = "processes"  # version 2: where the processes of a plain user's own group are moved to
MOST_PASSES = 5
OPTIONAL = "cpu"  # equal weights: many processes in one slot take no CPU from other slots


class SlotCgroups:
    """The groups of one runner. `roots` maps a v1 controller (or "" for v2) to the runner's own folder in its hierarchy."""

    def __init__(self, roots: dict[str, Path], version: int) -> None:
        self.roots, self.version = roots, version

    def make_slot(self, index: int, leaf: str = "") -> list[int | None]:
        """Make one slot's groups. Returns the open files in the order of the protocol, None where the kernel lacks one.

        `leaf`: the group of the first process, below the group that counts CPU time.
        """
        once = {"memory.swappiness": "0"} if self.version == 1 else {"memory.swap.max": "0", "memory.oom.group": "1"}
        for slot in [root / f"slot{index}" for root in self.roots.values()]:
            slot.mkdir(exist_ok=True)
            for file, value in [(slot / name, value) for name, value in once.items()]:
                if file.exists():
                    file.write_text(value)
        files = self._open(index, _FILES)
        if (peak := files[_PEAK]) is not None and not _can_be_reset(peak):
            os.close(peak)
            files[_PEAK] = None  # no peak is better than that of a former program, perhaps of another tenant
        return [*files, *_open_all([(path, os.O_WRONLY) for path in self._attach_files(index, leaf)])]

    def _open(self, index: int, files: list[tuple[int, str, str, str]]) -> list[int | None]:
        v1 = self.version == 1
        folders = {controller: root / f"slot{index}" for controller, root in self.roots.items()}
        return [_open_or_none(folders[name] / one if v1 else folders[""] / two, mode) for mode, name, one, two in files]

    def _attach_files(self, index: int, leaf: str) -> list[Path]:
        """A process writes to these files to enter the groups, one for each hierarchy; two controllers may share one."""
        if self.version == 2:
            return [self.roots[""] / f"slot{index}" / "cgroup.procs"]
        controller_of = {self.roots[name]: name for name in (OPTIONAL, *REQUIRED[1]) if name in self.roots}
        return [
            root / f"slot{index}" / (leaf if controller == "cpuacct" else "") / "tasks"
            for root, controller in controller_of.items()
        ]

    def make_session_slot(self, index: int) -> tuple[list[int | None], list[int | None]]:
        """As `make_slot`, for a session: the kernel may kill one of its processes and leave the others.

        The caller owns the files, and the counters: memory in use, CPU time used, kills for lack of memory. Version 1: the
        session's first process starts in its leaf of the group that counts CPU time, because moving it later is slow (see
        `make_leaf`).
        """
        if self.version == 1:
            (self.roots["cpuacct"] / f"slot{index}" / FIRST_LEAF).mkdir(parents=True, exist_ok=True)
        files = self.make_slot(index, FIRST_LEAF)
        if self.version == 2:
            (self.roots[""] / f"slot{index}" / "memory.oom.group").write_text("0")
        return files, self._open(index, _COUNTERS)

    def make_leaf(self, index: int, leaf: int) -> list[int]:
        """A group for one process of a session: to kill it with the processes that it started, and to count its CPU time.

        Opens the list of its processes, the file that kills them (version 2) or stops them from forking (version 1), its CPU
        time, and the list of its threads. Version 1 also: the files by which a process enters the group itself. As in
        `steps.c` that skips the kernel's global lock, for which moving another process waits 10 to 25 ms.
        """
        names = ("pids", "cpuacct") if self.version == 1 else ("", "")
        group, counted = (self.roots[name] / f"slot{index}" / f"leaf{leaf}" for name in names)
        for folder in (group, counted):
            folder.mkdir(exist_ok=True)
        if self.version == 2:
            wanted = [("cgroup.procs", os.O_RDWR), ("cgroup.kill", os.O_WRONLY), ("cpu.stat", 0), ("cgroup.threads", 0)]
            files = [(group / name, mode) for name, mode in wanted]
        else:
            (group / "pids.max").write_text("max")
            files = [(group / "cgroup.procs", os.O_RDWR), (group / "pids.max", os.O_WRONLY)]
            files += [(counted / "cpuacct.usage", os.O_RDONLY), (counted / "tasks", os.O_RDONLY)]
            files += [(folder / "tasks", os.O_WRONLY) for folder in dict.fromkeys((group, counted))]
        return _open_all(files)

    def close(self) -> None:
        for root in self.roots.values():
            remove_tree(root)


def _open_all(files: list[tuple[Path, int]]) -> list[int]:
    """Open all of them, or none."""
    with contextlib.ExitStack() as opened:
        fds = []
        for path, mode in files:
            fds.append(os.open(path, mode | os.O_CLOEXEC))
            opened.callback(os.close, fds[-1])
        opened.pop_all()
    return fds


def _open_or_none(path: Path, mode: int) -> int | None:
    try:
        return os.open(path, mode | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None


def _can_be_reset(peak: int) -> bool:
    """False on version 2 before Linux 6.12, although root can open the file for writing there."""
    try:
        return os.pwrite(peak, b"0", 0) > 0
    except OSError:
        return False


def make_root(name: str) -> SlotCgroups:
    """Make the runner's groups under this name. Groups that a dead owner of the name left are removed first."""
    roots, version = _roots(name)
    for root in dict.fromkeys(roots.values()):  # two controllers may share a hierarchy
        remove_tree(root)
        root.mkdir()
    if version == 2:
        _delegate(roots[""] / "cgroup.subtree_control")
    return SlotCgroups(roots, version)


def remove_everywhere(name: str) -> None:
    """Remove groups of this name in every hierarchy: a dead owner may have run in another group than this process."""
    for top in {top for top, _ in hierarchies().values() if os.access(top, os.W_OK)}:
        for root in [Path(parent, name) for parent, folders, _ in os.walk(top) if name in folders]:
            remove_tree(root)  # os.walk tolerates folders that other processes remove meanwhile


def _roots(name: str) -> tuple[dict[str, Path], int]:
    v1 = {controller: own for controller, (_, own) in hierarchies().items() if os.access(own, os.W_OK)}
    if set(REQUIRED[1]) <= set(v1):
        return {controller: folder / name for controller, folder in v1.items() if controller in (*REQUIRED[1], OPTIONAL)}, 1
    return {"": _v2_parent() / name}, 2


def _delegate(control: Path) -> None:
    """Enable the controllers for the groups below; each group then has the same CPU weight."""
    control.write_text("".join(f"+{name} " for name in REQUIRED[2]))
    if OPTIONAL not in control.read_text().split():
        with contextlib.suppress(OSError):  # not delegated to this user
            control.write_text(f"+{OPTIONAL}")


def hierarchies(proc: Path = Path("/proc")) -> dict[str, tuple[Path, Path]]:
    """Controller ("" for version 2) -> the top of its hierarchy, and this process's group in it, or the top if not visible."""
    groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    paths = {name: path for _, names, path in groups for name in names.split(",")}
    found = {}
    for _, top, kind, options in (line.split()[:4] for line in (proc / "self/mounts").read_text().splitlines()):
        for name in {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, []):
            if name in paths:
                own = Path(top + paths[name])
                found[name] = Path(top), own if own.is_dir() else Path(top)
    return found


def up_to_top(top: Path, own: Path) -> list[Path]:
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]


def _v2_parent() -> Path:
    """The nearest group above this process that can delegate memory and pids to its children.

    A plain user may have been given the group that he is in, and no other.
    """
    if (group := hierarchies().get("")) is None:
        raise OSError("no cgroup file system is mounted")
    reason = "no controllers"
    for candidate in up_to_top(*group):
        try:
            control = candidate / "cgroup.subtree_control"
            if not os.access(candidate, os.W_OK):
                raise PermissionError(errno.EACCES, "not writable")
            if not {*REQUIRED[2], OPTIONAL} <= set(control.read_text().split()):
                _delegate(control)
            return candidate
        except OSError as error:
            reason = f"{candidate}: {error.strerror}"
    if os.geteuid() == 0 or not _is_delegated(group[1]):
        raise OSError(f"memory and pids cannot be delegated ({reason})")
    _empty(group[1])
    _delegate(group[1] / "cgroup.subtree_control")
    return group[1]


def _is_delegated(group: Path) -> bool:
    controllers = set((group / "cgroup.controllers").read_text().split())
    files = (".", "cgroup.procs", "cgroup.subtree_control")
    return set(REQUIRED[2]) <= controllers and all(os.access(group / name, os.W_OK) for name in files)


def _empty(group: Path) -> None:
    """Move a group's processes into a group below it: only a group without processes has controllers below it."""
    leaf = group / PROCESSES
    leaf.mkdir(exist_ok=True)
    for _ in range(MOST_PASSES):  # a process may fork before it is moved
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)


def remove_tree(root: Path, patience_s: float = 2.0) -> None:
    """Remove a group and those below it. Waits for a group whose last process is dying."""
    if not root.is_dir():
        return
    give_up = time.monotonic() + patience_s
    for folder in [*sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True), root]:
        while folder.is_dir():
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.01)
