"""Control groups of slots, on the machine's own file system."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_harness import need_sandbox

from worker.sandbox import cgroups

pytestmark = pytest.mark.vm

BURN = """
import os, sys, time
for fd in map(int, sys.argv[1:]): os.write(fd, b'0')
began = time.process_time()
while time.process_time() < began + 0.2: pass
"""


@pytest.fixture
def groups() -> Iterator[cgroups.SlotCgroups]:
    need_sandbox()
    made = cgroups.make_root(f"exec-service-test-{os.getpid()}")
    try:
        yield made
    finally:
        made.close()


def named(fds: list[int | None], *names: str, mode: int) -> list[int]:
    """Of a slot's files, those with one of these names that are opened so."""
    return [
        fd
        for fd in fds
        if fd is not None
        and Path(f"/proc/self/fd/{fd}").readlink().name in names
        and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == mode
    ]


def usage_ns(fds: list[int | None]) -> int:
    [fd] = named(fds, "cpuacct.usage", "cpu.stat", mode=os.O_RDONLY)
    words = os.pread(fd, 64, 0).split()
    return int(words[1]) * 1000 if len(words) > 1 else int(words[0])


def test_a_slot_counts_its_own_cpu_time(groups: cgroups.SlotCgroups) -> None:
    mine, other = groups.make_slot(0), groups.make_slot(1)
    attach = named(mine, "tasks", "cgroup.procs", mode=os.O_WRONLY)
    subprocess.run([sys.executable, "-c", BURN, *map(str, attach)], pass_fds=attach, check=True)
    assert usage_ns(mine) >= 0.2e9
    assert usage_ns(other) == 0


def test_a_peak_that_cannot_be_reset_is_not_opened(tmp_path: Path) -> None:
    """As on version 2 before Linux 6.12, where root can open the file for writing but each write fails."""
    slot = tmp_path / "slot0"
    slot.mkdir()
    for name in ("memory.max", "memory.events", "pids.max", "pids.current", "cpu.stat", "cgroup.threads", "cgroup.procs"):
        (slot / name).touch()
    (slot / "memory.peak").symlink_to("/dev/full")
    files = cgroups.SlotCgroups({"": tmp_path}, 2).make_slot(0)
    for fd in files:
        if fd is not None:
            os.close(fd)
    assert [fd is None for fd in files] == [False, True, *[False] * 6]


# A group that belongs to a plain user, and the user in it: `doctor` must find the layer, also when it was started before.
DELEGATED = """
group=$1; shift
echo $$ >$group/cgroup.procs
chown 65534:65534 $group $group/cgroup.procs $group/cgroup.threads $group/cgroup.subtree_control
exec setpriv --reuid=65534 --regid=65534 --clear-groups sh -c '"$@"; exec "$@"' sh "$@"
"""


def test_control_group_of_a_plain_user_is_used() -> None:
    need_sandbox()
    top, _ = cgroups.hierarchies().get("", (Path("/"), None))
    if not (control := top / "cgroup.subtree_control").exists() or not {"memory", "pids"} <= set(control.read_text().split()):
        pytest.skip("the machine has no control groups v2 that limit memory and processes")
    group = top / f"exec-service-test-{os.getpid()}"
    group.mkdir()
    look = [sys.executable, "-m", "exec_service", "doctor", "--json"]
    try:
        ended = subprocess.run(["sh", "-ec", DELEGATED, "sh", group, *look], capture_output=True, text=True, timeout=600)
        assert ended.stdout.count('{"what":"cgroup","state":"ok"}') == 2, ended
    finally:
        cgroups.remove_tree(group)
