"""Every status of the table from a real program."""

import asyncio
from typing import Any

import pytest
from common import until
from sandbox_harness import Lab, has_memory_peak, laboratory, one_core

from exec_wire import Result
from worker.sandbox.verdict import CPU_USED_UP


async def test_program_that_ends_is_ok(lab: Lab) -> None:
    result = await lab.run("print(6 * 7)")
    assert (result.status, result.blame, result.retryable, result.exit_code) == ("ok", "none", False, 0)
    assert (result.stdout, result.stderr, result.completed) == ("42\n", "", True)
    assert result.usage.wall_s > 0 and result.usage.cpu_s > 0
    assert (result.usage.memory_peak_bytes > 0) == has_memory_peak()


async def test_every_layer_is_on_and_reported(lab: Lab) -> None:
    result = await lab.run("pass")
    assert result.sandbox.tier == "A"
    layers = "userns netns pidns mntns ipcns utsns uid rlimits no_new_privs landlock seccomp cgroup"
    assert set(result.sandbox.layers) == set(layers.split())


async def test_exception_is_error(lab: Lab) -> None:
    result = await lab.run("1 / 0")
    assert (result.status, result.blame, result.exit_code, result.completed) == ("error", "model", 1, False)
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("code", "number", "blame"),
    [
        ("import os; os.abort()", 6, "model"),
        ("import ctypes; ctypes.string_at(0)", 11, "model"),
        ("import os; os.kill(os.getpid(), 9)", 9, "infra"),
        ("import os; os.kill(0, 15)", 15, "model"),
        ("import signal, time; signal.alarm(1); time.sleep(9)", 14, "model"),
    ],
    ids=["abort", "segfault", "own_kill", "own_group", "alarm"],
)
async def test_signal_is_reported_with_its_number(lab: Lab, code: str, number: int, blame: str) -> None:
    result = await lab.run(code)
    assert (result.status, result.signal, result.blame, result.exit_code) == ("signal", number, blame, None)


async def test_sleeper_times_out_by_its_own_fault_near_its_limit(lab: Lab) -> None:
    result = await lab.run("import time; time.sleep(60)", wall_s=0.5)
    assert (result.status, result.blame, result.retryable) == ("timeout", "model", False)
    assert 0.5 <= result.usage.wall_s < 2.5


async def test_timeout_kills_process_tree(lab: Lab) -> None:
    code = """
        import os, subprocess, time
        for _ in range(3):
            if os.fork() == 0:
                os.setsid()
                subprocess.run(["sleep", "60"])
        print("started", flush=True)
        time.sleep(60)
    """
    result = await lab.run(code, wall_s=0.7)
    assert (result.status, result.stdout) == ("timeout", "started\n")
    assert result.usage.processes_peak >= 4
    assert lab.sandboxed_pids == []


async def test_timeout_cut_short_by_the_deadline_is_infra(lab: Lab) -> None:
    result = await lab.run("import time; time.sleep(60)", wall_s=30, deadline_s=0.5)
    assert (result.status, result.blame, result.retryable) == ("timeout", "infra", True)


@pytest.mark.parametrize(
    "ignore", ["", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)"], ids=["plain", "ignored"]
)
async def test_cpu_time_beyond_its_limit_is_cpu_limit(lab: Lab, ignore: str) -> None:
    result = await lab.run(f"{ignore}\nwhile True: pass", cpu_s=1, wall_s=20)
    assert (result.status, result.blame) == ("cpu_limit", "model")
    assert CPU_USED_UP <= result.usage.cpu_s < 3


async def test_heap_beyond_memory_limit_is_memory_limit(lab: Lab) -> None:
    result = await lab.run("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=64)
    assert (result.status, result.blame, result.retryable) == ("memory_limit", "model", False)


async def test_memory_within_the_limit_is_ok_and_measured(lab: Lab) -> None:
    result = await lab.run("x = bytearray(100 << 20)", memory_mb=128)
    assert result.status == "ok"
    if has_memory_peak():
        assert 100 << 20 <= result.usage.memory_peak_bytes <= 128 << 20


async def test_endless_output_is_output_limit(lab: Lab) -> None:
    result = await lab.run("while True: print('y' * 1000)", output_kb=16)
    assert (result.status, result.blame, result.truncated) == ("output_limit", "model", True)
    assert result.stdout.startswith("yyy") and len(result.stdout) < 17 * 1024


async def test_cancelled_program_is_killed_and_its_slot_is_clean(lab: Lab) -> None:
    task = asyncio.create_task(lab.run("import os, time\nos.fork()\ntime.sleep(60)", wall_s=60))
    await until(lambda: lab.sandboxed_pids, "the program runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lab.sandboxed_pids == []


async def test_wall_limit_too_short_for_set_up_is_infra_and_does_not_recycle_the_zygote(lab: Lab) -> None:
    before = lab.pool.zygote_restarts
    results = [await lab.run("import scipy\nwhile True: pass", wall_s=0.0005) for _ in range(4)]
    for result in results:  # on a busy machine the kill may come after set-up, and then it was the program's time
        assert (result.status, result.blame) == ("timeout", "infra" if result.timings.run_ms == 0 else "model")
    assert lab.pool.zygote_restarts == before


async def on_a_busy_machine(code: str, copies: int, mask: tuple[str, ...] = (), **limits: Any) -> list[Result]:
    """So many at once on one core."""
    with one_core():
        async with laboratory(slots=copies, mask_layers=list(mask), min_tier="D") as crowd:
            return await asyncio.gather(*(crowd.run(code, **limits) for _ in range(copies)))


@pytest.mark.parametrize("mask", [(), ("cgroup",), ("userns",)], ids=["tier A", "tier B", "tier D"])
async def test_an_endless_program_is_the_models_fault_however_many_share_its_core(mask: tuple[str, ...]) -> None:
    results = await on_a_busy_machine("while True: pass", 3, mask, wall_s=1.5, cpu_s=20)
    assert [(result.status, result.blame) for result in results] == [("timeout", "model")] * 3
    assert all(1.5 <= result.usage.wall_s < 1.8 for result in results)


async def test_a_program_that_shares_its_core_has_as_much_time_as_one_that_does_not() -> None:
    code = "import time\nwhile time.process_time() < 1: pass"
    results = await on_a_busy_machine(code, 2, wall_s=1.6)
    assert [result.status for result in results] == ["ok", "ok"]


async def test_threads_do_not_cost_a_program_its_time() -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nwhile True: pass"
    results = await on_a_busy_machine(code, 3, wall_s=1.0, cpu_s=20)
    assert [(result.status, result.blame) for result in results] == [("timeout", "model")] * 3
    assert all(result.usage.cpu_s > 0.8 for result in results)
