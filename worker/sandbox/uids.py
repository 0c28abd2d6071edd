"""Blocks of user ids, one per runner, so that two services on one host never share a uid.

A lock on a file holds a block; the first uid names it. Processes are killed only under the uids of a block that was taken. A
block can be taken if it is between fixed bounds, if no user of this machine has a uid in it, and if no process runs under its
uids; then its lock file is marked. The kernel releases the lock when its owner ends; an owner that ends normally also removes
the file. So a marked file without a lock belongs to a dead owner, and processes under its uids are that owner's leftovers.
"""

import fcntl
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from worker.sandbox import kernel

log = logging.getLogger("runner")

BLOCK_SIZE = 1024
BLOCKS = 512
DEFAULT_BASE = 2_000_000_000  # beyond the ranges that distributions and systemd use
MIN_UID = 100_000  # lower uids belong to users and services of a machine
MIN_MAPPED_UID = 32_768  # the same in a user namespace: that of a pod ends at 65,535
MAX_BASE = 2**32 - 1 - BLOCK_SIZE  # the last uid means "none" to the kernel
STATE_FOLDER = Path("/run/exec-service")


class NoFreeUids(Exception):
    pass


class UidBlock:
    """`root` is the jail's uid 0; `first` to `first + capacity - 1` belong to sandboxes."""

    def __init__(self, base: int, lock: Path, lock_fd: int) -> None:
        self.base = base
        self._lock, self._lock_fd = lock, lock_fd
        self.root, self.first, self.capacity = base, base + 1, BLOCK_SIZE - 1

    @property
    def name(self) -> str:
        return f"exec-service-{self.base}"

    @property
    def uids(self) -> range:
        return range(self.base, self.base + BLOCK_SIZE)

    @property
    def is_marked(self) -> bool:
        return os.fstat(self._lock_fd).st_size > 0

    def mark(self) -> None:
        os.pwrite(self._lock_fd, b"taken\n", 0)

    def release(self) -> None:
        """All leftovers are removed: free the block."""
        self._lock.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Leftovers remain: the next runner removes them."""
        os.close(self._lock_fd)


def take_block(base: int = DEFAULT_BASE, folder: Path = STATE_FOLDER) -> UidBlock:
    """Take the first free block from `base` on. Processes that a dead owner left under its uids are killed."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    refused = ""
    for first in range(base, base + BLOCKS * BLOCK_SIZE, BLOCK_SIZE):
        if why := refusal(first):
            refused = why
            continue
        if (block := _try_lock(first, folder, os.O_CREAT)) is None:
            continue
        if block.is_marked:
            kill_all_of(block.uids)
        elif foreign := list(processes_of(block.uids)):
            block.release()
            refused = f"processes {foreign} of other owners run under uids {first}-{first + BLOCK_SIZE - 1}"
            log.warning("skipping uid block %s: %s", first, refused)
            continue
        block.mark()
        return block
    raise NoFreeUids(f"none of {BLOCKS} uid blocks from {base} on is free; see {folder}{refused and f' ({refused})'}")


def clean_abandoned(clean: Callable[[UidBlock], None], folder: Path = STATE_FOLDER) -> None:
    """Call `clean` for each block whose owner is dead; the block is locked meanwhile and free afterwards."""
    for lock in folder.glob("uids-*.lock"):
        number = lock.stem.removeprefix("uids-")
        if not number.isdecimal() or refusal(int(number)) or (block := _try_lock(int(number), folder, 0)) is None:
            continue
        try:
            if block.is_marked:
                clean(block)
        except (OSError, NoFreeUids) as error:
            log.warning("removing the leftovers of uid block %s failed: %s", block.base, error)
            block.leave()
        else:
            block.release()


def _try_lock(first: int, folder: Path, flags: int) -> UidBlock | None:
    """Lock this block's file. None if another process holds or has just removed it."""
    lock = folder / f"uids-{first}.lock"
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), lock.lstat()):
            return UidBlock(first, lock, fd)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def refusal(first: int) -> str:
    """Why the block from this uid on must not be used; empty if it may be."""
    last = first + BLOCK_SIZE - 1
    if first < min_uid() or first > MAX_BASE:
        return f"uids {first}-{last} are not between {min_uid()} and {MAX_BASE + BLOCK_SIZE - 1}"
    if not any(start <= first and last < start + count for start, count in _mapped(Path("/proc/self/uid_map").read_text())):
        return f"uids {first}-{last} are not in this user namespace"
    for name, start, count in _accounts():
        if start <= last and first < start + count:
            return f"uids {first}-{last} belong to {name}"
    return ""


def min_uid() -> int:
    return MIN_UID if kernel.root_is_root() else MIN_MAPPED_UID


def _accounts() -> Iterator[tuple[str, int, int]]:
    """The users of this machine: name, first uid, number of uids."""
    for file, uid, count in (("/etc/passwd", 2, None), ("/etc/subuid", 1, 2)):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for parts in (line.split(":") for line in lines):
            numbers = [parts[i] if len(parts) > i else "" for i in (uid, count) if i is not None]
            if all(number.isdecimal() for number in numbers):
                yield f"{parts[0]} in {file}", int(numbers[0]), int(numbers[1]) if count else 1


def _mapped(maps: str) -> list[tuple[int, int]]:
    return [(int(first), int(count)) for first, _, count in (line.split() for line in maps.splitlines())]


def mapped_base(base: int, maps: str) -> int | None:
    """`base`, or the upper half of this user namespace if `base` is outside of it; None if that is too small.

    `maps` is the text of /proc/self/uid_map.
    """
    ranges = _mapped(maps)
    if any(first <= base and base + BLOCK_SIZE <= first + count for first, count in ranges):
        return base
    first, count = max(ranges, key=lambda ids: ids[1])
    middle = first + count // 2
    return middle if middle >= MIN_MAPPED_UID and count // 2 >= BLOCK_SIZE else None


def kill_all_of(uids: range, patience_s: float = 5.0) -> None:
    """Kill every process under these uids and wait for their end. The uids must be those of a block that was taken."""
    if uids.start < min_uid():
        raise NoFreeUids(f"uids {uids.start}-{uids.stop - 1} do not belong to a sandbox: nothing was killed")
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
