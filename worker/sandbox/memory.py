"""How much memory programs can use: the machine's, or the limit of a control group above this process (version 1 or 2)."""

import os
from pathlib import Path
from typing import NamedTuple

LIMIT_FILE = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


class Memory(NamedTuple):
    bytes: int
    whose: str  # the machine or a control group, as part of a sentence


def usable(proc: Path = Path("/proc")) -> Memory:
    machine = Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has")
    return min([machine, *_limits(proc)])


def _limits(proc: Path) -> list[Memory]:
    """The limits of this process's group and of those above it; in a container the topmost visible one is its own."""
    try:
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
        mounts = [line.split()[:4] for line in (proc / "self/mounts").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, where, kind, options in mounts:
        if kind not in LIMIT_FILE or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        wanted = "memory" if kind == "cgroup" else ""
        own = next((path for _, controllers, path in groups if wanted in controllers.split(",")), "/")
        group = Path(where + own) if Path(where + own).is_dir() else Path(where)
        above = [folder for folder in (group, *group.parents) if folder.is_relative_to(where)]
        found += [Memory(limit, f"the control group {folder} allows") for folder in above if (limit := _limit(folder, kind))]
    return found


def _limit(folder: Path, kind: str) -> int:
    """0 if there is none; version 1 has a number that no machine reaches instead."""
    try:
        text = (folder / LIMIT_FILE[kind]).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def shortfall(slots: int, memory_mb: int, memory: Memory) -> str:
    """A message if programs in all slots, each with `memory_mb`, need more than there is; else empty."""
    have_mb = memory.bytes >> 20
    if slots * memory_mb <= have_mb:
        return ""
    return (
        f"{slots} slots of {memory_mb} MB, the default of limits.memory_mb, need {slots * memory_mb} MB; "
        f"{memory.whose} {have_mb} MB. "
        "Programs that are within their limits can be killed, with the blame infra. "
        f"Set EXEC_SLOTS to {max(1, have_mb // memory_mb)} or less, or add memory"
    )
