"""An order's reader: called at once if nothing else is to come, else at most every `PACE_S`."""

import asyncio
import time

import pytest
import uvloop

from exec_service.dispatch.admission import Admission
from exec_service.dispatch.requests import ANONYMOUS, PACE_S, CallRequest
from exec_service.dispatch.tickets import Ticket
from exec_service.telemetry.metrics import Metrics
from exec_wire import Result, verdict
from exec_wire.messages.calls import Tags


def order_of(calls: int) -> tuple[CallRequest, list[Ticket]]:
    order = CallRequest(ANONYMOUS, Admission(9, 99, 1.0, time.monotonic), Metrics())
    waiters = [Ticket(order, index, "", 0.0, 60.0, 1, Tags(), "") for index in range(calls)]
    order.pending.update(waiters)
    return order, waiters


def land(order: CallRequest, waiter: Ticket) -> None:
    order.deliver(waiter, verdict("ok"), 1)


def indexes(results: list[Result]) -> list[int]:
    return [result.index for result in results]


async def test_first_result_is_taken_at_once_and_what_lands_soon_after_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_service.dispatch.requests.PACE_S", 1.0)
    order, waiters = order_of(4)
    land(order, waiters[0])
    assert indexes(await order.take()) == [0]
    second = asyncio.create_task(order.take())
    for waiter in waiters[1:3]:
        land(order, waiter)
        await asyncio.sleep(0)
    assert indexes(await second) == [1, 2]


async def test_last_result_is_taken_at_once_with_those_before_it() -> None:
    order, waiters = order_of(3)
    land(order, waiters[0])
    await order.take()
    loop, reader = asyncio.get_running_loop(), asyncio.create_task(order.take())
    began = loop.time()
    for waiter in waiters[1:]:
        land(order, waiter)
    order._due_at = began + 3600  # nobody would live to see it, if it were waited for
    assert indexes(await reader) == [1, 2]
    assert await order.take() == []


async def test_what_landed_while_the_reader_was_writing_waits_for_its_pace() -> None:
    order, waiters = order_of(3)
    land(order, waiters[0])
    await order.take()
    land(order, waiters[1])
    began = asyncio.get_running_loop().time()
    assert indexes(await order.take()) == [1]
    assert asyncio.get_running_loop().time() - began > PACE_S / 2


async def test_closing_calls_a_reader_that_waits_for_its_pace() -> None:
    order, waiters = order_of(3)
    land(order, waiters[0])
    await order.take()
    order._due_at += 3600
    reader = asyncio.create_task(order.take())
    await asyncio.sleep(0)
    land(order, waiters[1])
    order.close()
    assert await reader == []


def test_no_result_is_held_back_by_a_clock_of_whole_milliseconds() -> None:
    async def hand_over() -> None:
        for _ in range(60):
            order, waiters = order_of(3)
            land(order, waiters[0])
            await order.take()
            land(order, waiters[1])
            async with asyncio.timeout(30):
                assert indexes(await order.take()) == [1]
            await asyncio.sleep(0.0007)

    uvloop.run(hand_over())


async def test_a_call_that_joins_does_not_hold_back_what_has_landed() -> None:
    order, waiters = order_of(3)
    order.expecting = True
    joins = waiters.pop()
    order.pending.discard(joins)
    land(order, waiters[0])
    await order.take()
    land(order, waiters[1])  # nothing is pending: the reader is called at once
    order.pending.add(joins)
    async with asyncio.timeout(30):
        assert indexes(await order.take()) == [1]
