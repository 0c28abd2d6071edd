"""A program's wall time is what elapsed less the time that others kept a CPU from it; only the deadline is the machine's fault.

Nothing here measures speed: each program needs more, or less, time than it may have, whatever else the machine does.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sandbox_harness import Lab, busy_machine, has_cgroups_v1, laboratory, one_core
from session_harness import SessionLab, session_laboratory

from exec_wire import Limits

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
async def session_lab() -> AsyncIterator[SessionLab]:
    async with session_laboratory() as lab:
        yield lab


@pytest.fixture(scope="module", params=[(), ("cgroup",), ("userns",)], ids=["tier-A", "tier-B", "tier-D"])
async def tier_lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    async with laboratory(slots=2, mask_layers=list(request.param), min_tier="D") as lab:
        yield lab


def verdicts(results: list[Any]) -> set[tuple[str, str]]:
    return {(result.status, result.blame) for result in results}


async def test_endless_programs_on_a_busy_machine_are_the_models_timeouts() -> None:
    async with laboratory(slots=3 * CORES) as lab:
        with busy_machine():
            loops = [lab.run("while True: pass", wall_s=0.3, cpu_s=60, deadline_s=120) for _ in range(6 * CORES)]
            assert verdicts(await asyncio.gather(*loops)) == {("timeout", "model")}


async def test_a_starved_program_has_the_time_that_it_was_promised() -> None:
    code = "import time\nwhile time.process_time() < 0.4: pass"
    with one_core():
        async with laboratory(slots=2) as lab:
            with busy_machine():
                result = await lab.run(code, wall_s=0.8, deadline_s=120)
    assert result.status == "ok"
    assert result.usage.wall_s < result.usage.elapsed_s


# What one crowd needs in all: more than its limit on all cores together, so that it ends only if its time was stretched.
CROWDS = {
    "double-forked": """
        import os, time
        for number in range(10):
            if os.fork() == 0:
                if os.fork() == 0:
                    while time.process_time() < NEED / 10: pass
                    open(f"done{number}", "w").close()
                os._exit(0)
            os.wait()
        while sum(name.startswith("done") for name in os.listdir()) < 10: pass
    """,
    "children": """
        import os, time
        for number in range(10):
            if os.fork() == 0:
                while time.process_time() < NEED / 10: pass
                os._exit(0)
        for _ in range(10): os.wait()
    """,
    "threads": """
        import hashlib, threading, time
        block = bytes(1 << 25)
        def work():
            while time.process_time() < NEED: hashlib.sha256(block)
        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads: thread.start()
        work()
        for thread in threads: thread.join()
    """,
}


def crowd(kind: str, limit_s: float) -> str:
    return CROWDS[kind].replace("NEED", str(1.7 * CORES * limit_s))


@pytest.mark.parametrize("kind", CROWDS)
async def test_a_crowd_gains_no_time(tier_lab: Lab, kind: str) -> None:
    result = await tier_lab.run(crowd(kind, 1.2), wall_s=1.2, cpu_s=60, deadline_s=120, memory_mb=256)
    assert (result.status, result.blame) == ("timeout", "model")


async def test_a_crowd_gains_no_time_on_a_busy_machine() -> None:
    async with laboratory(slots=3) as lab:
        with busy_machine():
            crowds = [lab.run(crowd(kind, 0.5), wall_s=0.5, deadline_s=120, cpu_s=60, memory_mb=256) for kind in CROWDS]
            assert verdicts(await asyncio.gather(*crowds)) == {("timeout", "model")}


async def test_a_sleeper_gains_no_time(tier_lab: Lab) -> None:
    with busy_machine():
        result = await tier_lab.run("import time; time.sleep(600)", wall_s=0.5, deadline_s=120)
    assert (result.status, result.blame) == ("timeout", "model")
    assert result.usage.elapsed_s - result.usage.wall_s < 0.5 * result.usage.elapsed_s


async def test_time_asleep_before_a_wait_for_a_cpu_is_not_a_wait(tier_lab: Lab) -> None:
    """A thread that wakes is runnable with the counters that it went to sleep with."""
    with busy_machine():
        sleeps = [tier_lab.run("import time\nfor _ in range(8): time.sleep(0.15)", wall_s=60, deadline_s=120) for _ in range(8)]
        had = [result.usage.wall_s for result in await asyncio.gather(*sleeps)]
    assert min(had) >= 1.2


async def test_only_the_deadline_makes_a_timeout_the_machines() -> None:
    with one_core():
        async with laboratory(slots=2) as lab:
            with busy_machine():
                result = await lab.run("while True: pass", wall_s=30, deadline_s=1.0)
    assert (result.status, result.blame, result.retryable) == ("timeout", "infra", True)
    assert "deadline" in result.error


async def test_an_endless_loop_with_default_limits_is_a_timeout(lab: Lab) -> None:
    limits = {"wall_s": 1.0, "cpu_s": Limits(wall_s=1.0).cpu_s}  # what a caller who says nothing of it gets
    assert (await lab.run("while True: pass", deadline_s=120, **limits)).status == "timeout"
    assert Limits(wall_s=7).cpu_limit_s == 15


async def test_wall_time_is_what_the_program_had_and_elapsed_time_is_all(lab: Lab) -> None:
    result = await lab.run("import time; time.sleep(0.2)")
    assert 0.2 <= result.usage.wall_s <= result.usage.elapsed_s


async def test_endless_cells_on_a_busy_machine_are_the_models_timeouts() -> None:
    with one_core():
        async with session_laboratory() as lab:
            session = await lab.create()
            with busy_machine():
                results = [await session.run("while True: pass", wall_s=0.3) for _ in range(2)]
    assert verdicts(results) == {("timeout", "model")}
    assert all(result.usage.elapsed_s > result.usage.wall_s for result in results)


@pytest.mark.parametrize("kind", CROWDS)
async def test_a_cell_gains_no_time_by_a_crowd(session_lab: SessionLab, kind: str) -> None:
    session = await session_lab.create()
    result = await session.run(crowd(kind, 1.2), wall_s=1.2)
    assert (result.status, result.blame) == ("timeout", "model")


async def test_a_busy_fork_does_not_use_up_its_siblings_time(session_lab: SessionLab) -> None:
    """Each process of a session has a group of its own: what a sibling uses is not what this one had."""
    session = await session_lab.create()
    [fork] = await session.fork(1)
    code = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.4: pass"
    with busy_machine():
        results = await asyncio.gather(fork.run("while True: pass", wall_s=2), session.run(code, wall_s=1))
    assert [result.status for result in results] == ["timeout", "ok"]


async def test_threads_of_an_earlier_cell_bring_a_later_one_no_time(session_lab: SessionLab) -> None:
    session = await session_lab.create(wall_s=300, memory_mb=512)
    await session.ok("""
import hashlib, threading
def work():
    while True: hashlib.sha256(bytes(1 << 20))
for _ in range(40): threading.Thread(target=work, daemon=True).start()
import time; time.sleep(1)
""")
    result = await session.run("import time; time.sleep(600)", wall_s=0.5)
    assert (result.status, result.blame) == ("timeout", "model")


async def test_a_fork_that_stays_out_of_the_group_that_counts_its_time_is_refused(session_lab: SessionLab) -> None:
    """It moves there itself, by code that a cell can change; the zygote looks whether it did."""
    if not has_cgroups_v1():
        pytest.skip("in control groups v2 the zygote moves a fork, which has no part in it")
    session = await session_lab.create()
    await session.ok("""
import os
write, count = os.write, 0
def joins_all_but_the_last(fd, data):
    global count
    count += data == b"0"
    return len(data) if data == b"0" and count > 1 else write(fd, data)
os.write = joins_all_but_the_last
""")
    assert (await session.not_forkable()).code == "not_forkable"
