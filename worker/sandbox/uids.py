"""Blocks of user ids, one per runner, so that two services on one host never share one.

A block is held by a lock on a file and named by its first uid. The lock goes with its owner, however that ends; whoever takes a
block next first kills and removes what the last owner left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

BLOCK_SIZE = 1024
BLOCKS = 512
DEFAULT_BASE = 2_000_000_000  # beyond the ranges that distributions and systemd hand out
STATE_FOLDER = Path("/run/exec-service")


class NoFreeUids(Exception):
    pass


class UidBlock:
    """`root` is the jail's uid 0; `first` to `first + capacity - 1` belong to sandboxes."""

    def __init__(self, base: int, lock_fd: int) -> None:
        self.base = base
        self._lock_fd = lock_fd
        self.root, self.first, self.capacity = base, base + 1, BLOCK_SIZE - 1

    @property
    def name(self) -> str:
        return f"exec-service-{self.base}"

    @property
    def uids(self) -> range:
        return range(self.base, self.base + BLOCK_SIZE)

    def release(self) -> None:
        os.close(self._lock_fd)


def take_block(base: int = DEFAULT_BASE, folder: Path = STATE_FOLDER) -> UidBlock:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for number in range(BLOCKS):
        first = base + number * BLOCK_SIZE
        fd = os.open(folder / f"uids-{first}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        block = UidBlock(first, fd)
        kill_all_of(block.uids)
        return block
    raise NoFreeUids(f"all {BLOCKS} uid blocks from {base} on are in use; see {folder}")


def mapped_base(base: int, maps: str) -> int:
    """`base`, or where our user namespace does not reach so high, the upper half of what it has: that of a pod ends at 65,535.

    `maps` is the text of /proc/self/uid_map.
    """
    ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in maps.splitlines())]
    if any(first <= base and base + BLOCK_SIZE <= first + count for first, count in ranges):
        return base
    first, count = max(ranges, key=lambda ids: ids[1])
    return first + count // 2


def abandoned_blocks(folder: Path = STATE_FOLDER) -> Iterator[UidBlock]:
    """Blocks whose owner is dead; each is held while the caller cleans it, and free afterwards."""
    for lock in folder.glob("uids-*.lock"):
        first = int(lock.stem.removeprefix("uids-"))
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        block = UidBlock(first, fd)
        try:
            yield block
        finally:
            block.release()


def kill_all_of(uids: range, patience_s: float = 5.0) -> None:
    """Kill every process that runs under one of these uids, and see them gone."""
    give_up = time.monotonic() + patience_s
    while pids := list(processes_of(uids)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > give_up:
            raise NoFreeUids(f"processes {pids} under uids {uids.start}-{uids.stop - 1} do not die")
        time.sleep(0.01)


def processes_of(uids: range) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            status = Path(entry.path, "status").read_text()
        except OSError:
            continue
        real, effective = (int(uid) for uid in status.split("\nUid:", 1)[1].split()[:2])
        if "\nState:\tZ" not in status and (real in uids or effective in uids):
            yield int(entry.name)
