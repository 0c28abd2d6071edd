"""The memory that programs can use, and the warning or refusal if all slots together can need more."""

import fcntl
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from sandbox_harness import OWN_BASE, laboratory, need_sandbox

from exec_service.cli import doctor
from exec_service.cli.common import check_pool
from worker.config import WorkerConfig
from worker.sandbox import kernel
from worker.sandbox.runner_client import SandboxUnavailable

GB = 1 << 30
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def memory() -> Any:
    from worker.sandbox import memory

    return memory


def proc(folder: Path, mounts: str, groups: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/mounts").write_text(mounts)
    (folder / "proc/self/cgroup").write_text(groups)
    return folder / "proc"


def group(folder: Path, name: str, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{limit}\n")


def test_without_control_groups_it_is_the_machines(memory: Any, tmp_path: Path) -> None:
    assert memory.usable(tmp_path) == (MACHINE, "this machine has")


def test_the_smallest_limit_of_version_2_counts_also_one_above(memory: Any, tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    group(top / "pod", "memory.max", str(GB // 4))
    group(top / "pod/container", "memory.max", str(GB // 2))
    group(top / "pod/container/own", "memory.max", "max")
    found = memory.usable(proc(tmp_path, f"cgroup2 {top} cgroup2 rw 0 0\n", "0::/pod/container/own\n"))
    assert found == (GB // 4, f"the control group {top}/pod allows")


def test_a_limit_of_version_1_counts(memory: Any, tmp_path: Path) -> None:
    top = tmp_path / "memory"
    group(top, "memory.limit_in_bytes", "9223372036854771712")
    group(top / "docker/x", "memory.limit_in_bytes", str(GB // 8))
    mounts = f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0\ncgroup {top} cgroup rw,memory 0 0\n"
    assert memory.usable(proc(tmp_path, mounts, "4:memory:/docker/x\n3:cpu:/\n0::/\n")).bytes == GB // 8


def test_a_container_sees_its_own_group_at_the_top(memory: Any, tmp_path: Path) -> None:
    top = tmp_path / "memory"
    group(top, "memory.limit_in_bytes", str(GB // 8))
    mounts = f"cgroup {top} cgroup rw,memory 0 0\n"
    assert memory.usable(proc(tmp_path, mounts, "4:memory:/kubepods/pod/x\n")).bytes == GB // 8


def test_words_say_what_is_needed_what_is_there_and_what_to_set(memory: Any) -> None:
    assert memory.shortfall(4, 512, memory.Memory(2 * GB, "")) == ""
    words = memory.shortfall(5, 512, memory.Memory(2 * GB, "this machine has"))
    assert "5 slots of 512 MB" in words and "need 2560 MB" in words and "this machine has 2048 MB" in words
    assert "EXEC_SLOTS to 4 or less" in words


@pytest.fixture
def too_many() -> int:
    need_sandbox()
    slots = (MACHINE >> 20) // 512 + 1
    if slots > 300:
        pytest.skip("this machine has memory for more slots than a test should make")
    return slots


async def test_slots_beyond_the_memory_are_said(too_many: int, capfd: pytest.CaptureFixture[str]) -> None:
    async with laboratory(slots=too_many, max_sessions=0) as lab:
        await check_pool(lab.pool)
        assert f"WARNING: {too_many} slots of 512 MB" in capfd.readouterr().err
        assert await lab.output("print(1)") == "1\n"
        finding = doctor._examine_memory(lab.pool)
        assert (finding.state, "EXEC_SLOTS" in finding.fix) == ("note", True)


async def test_slots_beyond_the_memory_are_refused_if_strict(too_many: int) -> None:
    with pytest.raises(SandboxUnavailable, match="EXEC_STRICT_MEMORY is set"):
        async with laboratory(slots=too_many, strict_memory=True, max_sessions=0):
            pytest.fail("it runs programs")


async def test_doctor_shows_the_memory() -> None:
    need_sandbox()
    config = WorkerConfig(slots=2, max_sessions=0, profiles={}, min_tier="E", uid_base=OWN_BASE)
    [finding] = [one for one in (await doctor.examine(config, 0)).findings if one.what == "memory"]
    assert (finding.state, "2 slots of 512 MB fit in" in finding.why) == ("ok", True)


def test_descriptors_above_1023_can_be_waited_for() -> None:
    """A runner has eleven for each slot."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1100:
        pytest.skip("this process may not have so many")
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 1050)
    try:
        assert kernel.readable([high], 0) == []
        os.write(write, b"x")
        assert kernel.readable([high], 30) == [high]
    finally:
        for fd in (read, write, high):
            os.close(fd)
