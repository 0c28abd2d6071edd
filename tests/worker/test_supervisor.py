"""The supervisor of long-lived tasks: what fails is logged, counted and started again, and what keeps failing is not hidden."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_wire.queue.protocol import QueueUnavailable

MOST_FAILURES = 5


async def watch(run: Callable[[], Awaitable[None]], until: Callable[[Any], bool]) -> Any:
    from exec_wire.supervisor import Supervisor, stop

    supervisor = Supervisor()

    async def task() -> None:
        await run()

    task_ = supervisor.start("mine", task)
    async with asyncio.timeout(30):
        while not until(supervisor):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)
    await stop([task_])
    return supervisor


async def test_a_task_that_raises_is_logged_counted_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    starts = 0

    async def run() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise ZeroDivisionError("in a task")
        await asyncio.Event().wait()

    supervisor = await watch(run, lambda _: starts == 3)
    assert supervisor.failures == {"mine": 2} and not supervisor.gave_up_because
    supervisor.check()
    assert caplog.text.count("ZeroDivisionError: in a task") == 2 and "Traceback" in caplog.text


async def test_a_task_that_returns_or_is_cancelled_by_what_it_waits_for_is_started_again() -> None:
    starts = 0

    async def run() -> None:
        nonlocal starts
        starts += 1
        if starts == 2:
            raise asyncio.CancelledError
        if starts == 3:
            await asyncio.Event().wait()

    supervisor = await watch(run, lambda _: starts == 3)
    assert supervisor.failures["mine"] == 2


async def test_an_unavailable_queue_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_wire.supervisor.UNAVAILABLE_PAUSE_S", 0.0)
    starts = 0

    async def run() -> None:
        nonlocal starts
        starts += 1
        raise QueueUnavailable("not there", sent=False)

    supervisor = await watch(run, lambda _: starts > 2 * MOST_FAILURES)
    assert supervisor.failures == {"mine": 0} and not supervisor.gave_up_because


async def test_a_task_that_keeps_failing_is_given_up_and_told() -> None:
    from exec_wire import supervisor as module

    told = 0

    async def run() -> None:
        raise ZeroDivisionError("again")

    supervisor = module.Supervisor()

    def tell() -> None:
        nonlocal told
        told += 1

    supervisor.on_give_up(tell)
    task = supervisor.start("mine", run)
    async with asyncio.timeout(30):
        while supervisor.failures["mine"] <= MOST_FAILURES:  # noqa: ASYNC110 - it goes on all the same
            await asyncio.sleep(0.005)
    await module.stop([task])
    assert told == 1 and "mine" in supervisor.gave_up_because and supervisor.is_failing("mine")
    with pytest.raises(module.TaskKeepsFailing, match="ZeroDivisionError: again"):
        supervisor.check()


async def test_failures_that_are_far_apart_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_wire.supervisor.WINDOW_S", 0.0)
    monkeypatch.setattr("exec_wire.supervisor.PAUSE_S", 0.0)

    async def run() -> None:
        raise ZeroDivisionError

    supervisor = await watch(run, lambda supervisor: supervisor.failures["mine"] > 3 * MOST_FAILURES)
    assert not supervisor.gave_up_because
