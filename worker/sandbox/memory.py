"""How much memory programs can use: the machine's, or the limit of a control group above this process (version 1 or 2)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worker.sandbox.cgroups import hierarchies, up_to_top

LIMIT_FILE = {"memory": "memory.limit_in_bytes", "": "memory.max"}  # by controller, as in `hierarchies`


class Memory(NamedTuple):
    bytes: int
    whose: str  # the machine or a control group, as part of a sentence


def usable(proc: Path = Path("/proc")) -> Memory:
    machine = Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has")
    return min([machine, *_limits(proc)])


def _limits(proc: Path) -> Iterator[Memory]:
    """The limits of this process's group and of those above it; in a container the topmost visible one is its own."""
    with contextlib.suppress(OSError):  # there are no control groups
        found = hierarchies(proc)
        for controller in found.keys() & LIMIT_FILE.keys():
            for folder in up_to_top(*found[controller]):
                limit = folder / LIMIT_FILE[controller]
                text = limit.read_text().strip() if limit.is_file() else ""
                if text.isdigit() and int(text):  # without a limit, version 1 has a number that no machine reaches
                    yield Memory(int(text), f"the control group {folder} allows")


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
