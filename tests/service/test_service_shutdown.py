"""However a service ends, what was accepted is answered where that is possible, and nothing of it stays on the machine."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from common import wait_until
from service_harness import (
    COMMAND,
    ROOT,
    UP,
    Service,
    cgroups_of,
    environment,
    is_alive,
    left_of,
    programs_of,
    see_nothing_left,
    serving,
    slots_in_use,
    until_program_runs,
)

from worker.sandbox.uids import STATE_FOLDER

LONG = {"code": "import time\ntime.sleep(60)", "limits": {"wall_s": 60}, "deadline_s": 120}


@pytest.fixture
def own() -> Iterator[Service]:
    """A service of the test's own, to be ended."""
    with serving() as service:
        yield service


async def start(http: httpx.AsyncClient, service: Service, *calls: dict[str, object]) -> list[asyncio.Task[httpx.Response]]:
    """Send each in a request of its own and see them run."""
    tasks = [asyncio.create_task(http.post("/v1/run", json=call)) for call in calls]
    await until_program_runs(service, len(calls))
    return tasks


async def ended(service: Service, patience_s: float = 30) -> int:
    return await asyncio.to_thread(service.wait, patience_s)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_stop_finishes_what_runs_refuses_what_comes_and_leaves_nothing(own: Service, number: int) -> None:
    block, pids = own.block, own.tree
    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        (running,) = await start(http, own, {"code": "import time\ntime.sleep(1.5)\nprint('finished')"})
        own.kill(number)
        wait_until(lambda: "stopping" in own.words, "words about the stop")
        refused = await http.post("/v1/run", json={"code": "print(1)"})
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/healthz")).status_code == 200
        answer = await running
        assert (answer.status_code, answer.json()["status"], answer.json()["stdout"]) == (200, "ok", "finished\n")
    assert await ended(own) == 0
    assert left_of(block, pids) == []
    assert "Traceback" not in own.words


async def test_stop_answers_what_waits_too(own: Service) -> None:
    call = {"code": "import time\ntime.sleep(0.4)\nprint('finished')"}
    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        batch = asyncio.create_task(http.post("/v1/batch", json={"calls": [call] * 6}))
        await until_program_runs(own, 2)
        own.kill(signal.SIGTERM)
        assert (await batch).text.count('"stdout":"finished\\n"') == 6
    assert await ended(own) == 0


async def test_stop_whose_time_is_over_answers_what_is_unfinished() -> None:
    with serving(drain_s=0.5) as own:
        block, pids = own.block, own.tree
        async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
            (running,) = await start(http, own, LONG)
            own.kill(signal.SIGTERM)
            answer = (await running).json()
        assert (answer["status"], answer["blame"], answer["retryable"]) == ("internal_error", "infra", True)
        assert await ended(own) == 0
        assert left_of(block, pids) == []


async def test_second_ctrl_c_ends_at_once_and_leaves_nothing(own: Service) -> None:
    block = own.block
    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        (running,) = await start(http, own, LONG)
        pids = own.tree
        own.kill(signal.SIGINT)
        wait_until(lambda: "stopping" in own.words, "words about the stop")
        await asyncio.sleep(0.2)
        assert own.process.poll() is None
        own.kill(signal.SIGINT)
        assert await ended(own, 25) in (130, -signal.SIGINT)  # the drain would take 30 s
        (answer,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(answer, httpx.TransportError) or answer.status_code >= 500  # not taken for a result
    await asyncio.to_thread(see_nothing_left, block, pids)


async def test_second_ctrl_c_shows_no_traceback(own: Service) -> None:
    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        (running,) = await start(http, own, LONG)
        own.kill(signal.SIGINT)
        wait_until(lambda: "stopping" in own.words, "words about the stop")
        own.kill(signal.SIGINT)
        await ended(own)
        await asyncio.gather(running, return_exceptions=True)
    assert "Traceback" not in own.words


async def test_stop_while_starting_leaves_nothing() -> None:
    """The signal comes while the interpreters warm up."""
    for delay_s in (0.3, 0.8, 1.2):
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *UP,
            cwd=ROOT,
            env=environment(uid_base=OWN_BASE, slots=2, profiles='{"numpy": ["numpy"]}'),
            stderr=asyncio.subprocess.DEVNULL,
        )
        await asyncio.sleep(delay_s)
        process.terminate()
        code = await asyncio.wait_for(process.wait(), 60)
        assert code in (0, -signal.SIGTERM)  # before and after it can listen to signals
        await asyncio.to_thread(see_nothing_left, OWN_BASE, [process.pid])
    forget_block(OWN_BASE)


async def test_killed_service_takes_its_runner_and_programs_along(own: Service) -> None:
    block = own.block
    async with httpx.AsyncClient(base_url=own.url, timeout=60) as http:
        running = await start(http, own, LONG, LONG)
        pids = own.tree
        own.kill(signal.SIGKILL)
        await ended(own)
        await asyncio.gather(*running, return_exceptions=True)
    await asyncio.to_thread(see_nothing_left, block, pids)


# A block that only this test run takes, so that nobody else's start cleans up before ours.
OWN_BASE = 2_010_000_000 + os.getpid() % 250 * (1024 * 512)  # below the uids that container tools hand out


def forget_block(base: int) -> None:
    (STATE_FOLDER / f"uids-{base}.lock").unlink(missing_ok=True)


def survivor_in(groups: list[Path]) -> subprocess.Popen[bytes]:
    """As if a program had outlived its jail."""
    process = subprocess.Popen(["sleep", "100"], user=OWN_BASE + 7)
    for folder in groups:
        (folder / "slot99").mkdir()
        (folder / "slot99" / "cgroup.procs").write_text(str(process.pid))
    return process


@pytest.mark.alone  # whichever service starts next cleans up
async def test_next_start_removes_what_a_killed_one_left() -> None:
    with serving(uid_base=OWN_BASE) as first:
        assert first.block == OWN_BASE
        async with httpx.AsyncClient(base_url=first.url, timeout=60) as http:
            running = await start(http, first, LONG)
            pids = first.tree
            for pid in (first.runner_pid, first.process.pid, *pids):  # the runner first: it must not get to clean up
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            await ended(first)
            await asyncio.gather(*running, return_exceptions=True)
        wait_until(lambda: not any(map(is_alive, pids)), "all are dead")
        assert programs_of(OWN_BASE) == []  # they died with their jail
        left = cgroups_of(OWN_BASE)
        assert left  # else the rest of this test says nothing
        survivor = survivor_in(left)

    with serving(uid_base=OWN_BASE) as second:
        assert second.block == OWN_BASE
        assert survivor.wait(5) == -signal.SIGKILL
        assert not [folder for folder in cgroups_of(OWN_BASE) if (folder / "slot99").exists()]
        assert second.run("print(1)").sandbox.tier == "A"
        pids = second.tree
    assert left_of(OWN_BASE, pids) == []
    forget_block(OWN_BASE)


async def test_two_services_share_no_uid_and_no_control_group(service: Service, own: Service) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        running = [asyncio.create_task(http.post(f"{one.url}/v1/run", json=LONG)) for one in (service, own) for _ in range(2)]
        for one in (service, own):
            await until_program_runs(one, 2)
        uids = [slots_in_use(one.block) for one in (service, own)]
        groups = [{group for pid in one.program_pids if "exec-service-" in (group := group_of(pid))} for one in (service, own)]
        assert [len(set_) for set_ in (*uids, *groups)] == [2, 2, 2, 2]  # each program has a uid and a group of its own
        assert not uids[0] & uids[1]
        for one, found in zip((service, own), groups, strict=True):
            assert all(f"/exec-service-{one.block}/slot" in group for group in found)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    wait_until(lambda: not service.program_pids, "programs die with their connection")


def group_of(pid: int) -> str:
    """The control group that counts a process's memory, v1 or v2."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line for line in lines if ":memory:" in line), lines[-1])
