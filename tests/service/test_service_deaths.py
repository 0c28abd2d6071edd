"""Processes of the service are killed under load: every call is answered right all the same, and the service heals."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from common import wait_until
from service_harness import Service, mixed_case, see_nothing_left, serving, until_program_runs

from exec_client import AsyncClient, Call, Limits, Result

CALLS = 100


@pytest.fixture(scope="module")
def mortal() -> Iterator[Service]:
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}') as service:
        yield service


def calls() -> tuple[list[Call], list[Callable[[Result], str]]]:
    """Mixed ones that each take long enough to be hit."""
    cases = [mixed_case(number) for number in range(CALLS)]
    waits = [0.1] * (CALLS - 1) + [3]  # the last one holds the others' request open until somebody has looked
    code = "import time; time.sleep({})\n{}"
    slowed = [
        Call(**case.call | {"code": code.format(wait, case.call["code"])}) for wait, case in zip(waits, cases, strict=True)
    ]
    return slowed, [case.problem for case in cases]


VICTIMS: dict[str, Callable[[Service], list[int]]] = {
    "a zygote": lambda service: service.zygote_pids[:1],
    "every zygote": lambda service: service.zygote_pids,
    "a jail": lambda service: service.nsjail_pids[:1],
    "the runner": lambda service: [service.runner_pid],
}


@pytest.mark.parametrize("victim", VICTIMS)
async def test_calls_are_answered_right_when_it_is_killed(mortal: Service, victim: str) -> None:
    programs, checks = calls()
    async with AsyncClient(mortal.url) as client:
        running = asyncio.create_task(client.run_many(programs))
        seen = asyncio.create_task(until_program_runs(mortal))
        await asyncio.wait({running, seen}, return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.result()
        await seen
        await asyncio.sleep(0.2)
        assert not running.done()
        dead = VICTIMS[victim](mortal)
        assert dead
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        results = await running
    assert [problem for check, result in zip(checks, results, strict=True) if (problem := check(result))] == []
    assert {result.blame for result in results} == {"none", "model"}
    await see_healed(mortal)


async def see_healed(service: Service) -> None:
    """Both profiles are warm again, and it says that it is ready."""
    wait_until(lambda: service.http.get("/readyz").status_code == 200, "ready again")
    wait_until(lambda: len(service.zygote_pids) == 2, "both interpreters are there again")
    results = [service.run("print(6 * 7)"), service.run("import numpy\nprint(numpy.arange(4).sum())")]
    assert [(result.status, result.stdout, result.sandbox.tier) for result in results] == [
        ("ok", "42\n", "A"),
        ("ok", "6\n", "A"),
    ]
    assert service.metric("exec_in_flight") == 0


async def test_dead_runner_leaves_nothing_to_the_next_one(mortal: Service) -> None:
    before, block = mortal.tree, mortal.block
    os.kill(mortal.runner_pid, signal.SIGKILL)
    gone = [pid for pid in before if pid != mortal.process.pid]
    wait_until(lambda: not set(gone) & set(mortal.tree), "the old tree is gone")
    wait_until(lambda: len(mortal.zygote_pids) == 2, "there is another runner with its interpreters")
    if mortal.block != block:  # another service has ended meanwhile, and its lower block was free
        see_nothing_left(block, gone)
    await see_healed(mortal)


async def test_program_that_kills_all_it_can_reach_harms_nobody(mortal: Service) -> None:
    bad = Call("import os\nwhile True:\n    os.kill(-1, 9)", limits=Limits(wall_s=1))
    async with AsyncClient(mortal.url) as client:
        runs = [client.run(bad, deadline_s=30) for _ in range(2)]
        good = [client.run(f"print({n})") for n in range(30)]
        outcomes = await asyncio.gather(*good, *runs, return_exceptions=True)
    assert [outcome.stdout for outcome in outcomes[:30]] == [f"{n}\n" for n in range(30)]
    await see_healed(mortal)
