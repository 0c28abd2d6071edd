"""Zygotes, runners and whole services that die, and what the next one finds."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S, until
from sandbox_harness import (
    OWN_BASE,
    OWN_UIDS,
    Lab,
    busy_machine,
    cgroups_of,
    children_of,
    host_mounts,
    is_alive,
    laboratory,
    need_sandbox,
    processes_in,
    tree_of,
    uid_of,
)

from worker.sandbox import uids
from worker.sandbox.zygote_client import ZygoteLost

SLEEP = "import time\ntime.sleep(60)"


async def running(lab: Lab, code: str = SLEEP, programs: int = 1) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(lab.run(code, wall_s=60)) for _ in range(programs)]
    await until(lambda: len(lab.sandboxed_pids) >= 2 * programs, "the programs run")  # each with its stub
    return tasks


async def test_dead_zygote_is_replaced_and_its_program_can_be_started_again(own_lab: Lab) -> None:
    tasks = await running(own_lab, programs=2)
    (zygote,) = own_lab.zygote_pids
    os.kill(zygote, signal.SIGKILL)
    for task in tasks:
        with pytest.raises(ZygoteLost):
            async with asyncio.timeout(30):
                await task
    assert (await own_lab.run("print('again')")).stdout == "again\n"
    assert zygote not in own_lab.zygote_pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_dead_nsjail_takes_its_programs_along_and_is_replaced(own_lab: Lab, number: int) -> None:
    (task,) = await running(own_lab)
    (nsjail,) = own_lab.nsjail_pids
    programs = own_lab.sandboxed_pids
    os.kill(nsjail, number)
    with pytest.raises(ZygoteLost):
        async with asyncio.timeout(30):
            await task
    assert (await own_lab.run("print('again')")).stdout == "again\n"
    await until(lambda: not any(is_alive(pid) for pid in programs), "the programs are dead")


async def test_stopped_zygote_is_found_by_heartbeat_and_replaced(own_lab: Lab) -> None:
    (task,) = await running(own_lab)
    (zygote,) = own_lab.zygote_pids
    os.kill(zygote, signal.SIGSTOP)
    with pytest.raises(ZygoteLost):
        async with asyncio.timeout(PATIENCE_S):
            await task
    assert (await own_lab.run("print('again')")).stdout == "again\n"
    assert own_lab.pool.zygote_restarts == 1 and not is_alive(zygote)


async def test_call_waits_for_the_next_zygote(own_lab: Lab) -> None:
    os.kill(own_lab.zygote_pids[0], signal.SIGKILL)
    results = await asyncio.gather(*(own_lab.run("print(1)") for _ in range(6)), return_exceptions=True)
    assert all(isinstance(result, ZygoteLost) or result.stdout == "1\n" for result in results)
    assert (await own_lab.run("print(2)")).stdout == "2\n"


async def test_dead_runner_is_replaced_with_everything_it_had(own_lab: Lab) -> None:
    (task,) = await running(own_lab)
    before = tree_of(own_lab.runner_pid)
    programs, base = own_lab.sandboxed_pids, own_lab.uid_base
    os.kill(before[0], signal.SIGKILL)
    with pytest.raises(ZygoteLost):
        async with asyncio.timeout(30):
            await task
    assert (await own_lab.run("print('again')")).stdout == "again\n"
    assert not any(is_alive(pid) for pid in (*before, *programs))
    assert (own_lab.uid_base, own_lab.pool.sandbox.tier, own_lab.pool.alive) == (base, "A", True)


async def test_runner_that_dies_again_and_again_is_replaced_each_time(own_lab: Lab) -> None:
    for _ in range(3):
        tree = tree_of(own_lab.runner_pid)
        os.kill(own_lab.runner_pid, signal.SIGKILL)
        await until(lambda: not any(is_alive(pid) for pid in tree), "the zygotes are dead, which may lose a program that runs")  # noqa: B023
        assert (await own_lab.run("print('again')")).stdout == "again\n"


async def test_runner_and_its_zygotes_die_with_the_worker() -> None:
    """Also without a goodbye: the socket closes, the runner cleans up."""
    need_sandbox()
    worker = await start_worker()
    (runner,) = children_of(worker.pid)
    tree = tree_of(runner)
    base = base_of(tree)
    worker.kill()
    await worker.wait()
    await until(lambda: not any(is_alive(pid) for pid in tree), "runner, nsjail and zygotes are dead")
    await until(lambda: cgroups_of(base) == [], "the control groups are gone")
    assert not (uids.STATE_FOLDER / f"exec-service-{base}").exists()


@pytest.mark.alone  # whichever service starts next cleans up
async def test_after_kill_9_of_everything_the_next_start_removes_what_was_left() -> None:
    mounts = host_mounts()
    worker = await start_worker()
    (runner,) = children_of(worker.pid)
    tree = tree_of(runner)
    base = base_of(tree)
    for pid in (worker.pid, *tree):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    await worker.wait()
    await until(lambda: not any(is_alive(pid) for pid in tree), "everything is dead")
    assert cgroups_of(base) != []  # no process was left to remove them
    # What a process of the dead owner would look like that is still there, in its group and under its uid.
    straggler = await asyncio.create_subprocess_exec("sleep", "60", user=base + 1, group=base + 1, extra_groups=[], cwd="/")
    for group in cgroups_of(base):
        if (group / "slot0").is_dir():
            (group / "slot0" / "cgroup.procs").write_text(str(straggler.pid))
    async with laboratory(slots=1) as lab:
        assert lab.uid_base == base
        assert (await lab.run("print('clean')")).stdout == "clean\n"
        async with asyncio.timeout(30):
            assert await straggler.wait() == -signal.SIGKILL
    assert cgroups_of(base) == []
    assert not (uids.STATE_FOLDER / f"exec-service-{base}").exists()
    assert host_mounts() == mounts


async def test_two_services_share_no_uid_and_no_control_group() -> None:
    async with laboratory(slots=1) as one, laboratory(slots=1) as other:
        assert abs(one.uid_base - other.uid_base) >= uids.BLOCK_SIZE
        assert one.cgroups and other.cgroups and not set(one.cgroups) & set(other.cgroups)
        tasks = [asyncio.create_task(lab.run(SLEEP, wall_s=1)) for lab in (one, other)]
        await until(lambda: one.sandboxed_pids and other.sandboxed_pids, "both run")
        assert not {uid_of(pid) for pid in one.sandboxed_pids} & {uid_of(pid) for pid in other.sandboxed_pids}
        assert not set(processes_in(one.cgroups)) & set(processes_in(other.cgroups))
        await asyncio.gather(*tasks)


async def test_a_pool_that_closes_leaves_nothing() -> None:
    mounts = host_mounts()
    async with laboratory() as lab:
        tasks = await running(lab, programs=2)
        tree, base = tree_of(lab.runner_pid), lab.uid_base
        assert cgroups_of(base) != []
    assert all(isinstance(end, ZygoteLost) for end in await asyncio.gather(*tasks, return_exceptions=True))
    assert not any(is_alive(pid) for pid in tree)
    assert cgroups_of(base) == [] and host_mounts() == mounts
    assert not (uids.STATE_FOLDER / f"exec-service-{base}").exists()


async def test_stubs_of_programs_that_are_over_leave_soon_and_count_for_no_other(own_lab: Lab) -> None:
    """With its stub, which its limit allows for, a program that has one child has as many processes as it may."""
    fork = "import os\nif not os.fork(): os._exit(0)\nos.wait()"
    with busy_machine():
        ends = await asyncio.gather(*(own_lab.run(fork, processes=2) for _ in range(200)))
    assert {(end.status, end.stderr) for end in ends} == {("ok", "")}
    await until(lambda: not any(map(children_of, own_lab.zygote_pids)), "no stub is left")
    assert own_lab.sandboxed_pids == []


async def test_python_under_a_closed_home_folder_works(lab: Lab) -> None:
    prefix = Path((await lab.output("import sys, json, ctypes\nprint(sys.base_prefix)")).strip())
    assert prefix == Path(sys.base_prefix)
    if all(folder.stat().st_mode & 0o005 == 0o005 for folder in (prefix, *prefix.parents)):
        pytest.skip("works, but this machine's Python is open to everybody")


async def test_checkout_and_packages_under_a_closed_home_folder_work(tmp_path: Path) -> None:
    need_sandbox()
    checkout = tmp_path / "closed" / "checkout"
    for room in ("worker", "exec_wire"):
        shutil.copytree(CHECKOUT / room, checkout / room)
    packages = checkout / ".sandbox-packages"
    packages.mkdir()
    (packages / "greeting.py").write_text("words = 'hello from a closed folder'")
    (tmp_path / "closed").chmod(0o700)
    worker = await start_worker("import greeting\nprint(greeting.words)", checkout)
    assert worker.stdout is not None
    assert await worker.stdout.read() == b"hello from a closed folder\n"
    assert await worker.wait() == 0


CHECKOUT = Path(__file__).parents[2]
WORKER = """
import asyncio, sys
from exec_wire import Call
from worker.config import WorkerConfig
from worker.pool import Pool
async def main():
    async with Pool(WorkerConfig(slots=1, profiles={"bare": []}, uid_base=int(sys.argv[2]))) as pool:
        await pool.wait_ready()
        print("ready", flush=True)
        result = await pool.run(Call(code=sys.argv[1]), pool.take_slot(), 60)
        print(result.stdout, result.stderr, sep="", end="")
asyncio.run(main())
"""


async def start_worker(code: str = SLEEP, checkout: Path = CHECKOUT) -> asyncio.subprocess.Process:
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        code,
        str(OWN_BASE),
        stdout=subprocess.PIPE,
        cwd=checkout,
        env={"PYTHONPATH": str(checkout)},
    )
    assert worker.stdout is not None
    async with asyncio.timeout(30):
        assert await worker.stdout.readline() == b"ready\n"
    return worker


def base_of(tree: list[int]) -> int:
    """The jail's root is the first uid of its block."""
    return next(uid_of(pid) for pid in tree if uid_of(pid) in OWN_UIDS)
