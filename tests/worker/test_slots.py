"""The order in which cells and calls get the slots of a saturated worker: counted, not timed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from common import until
from session_harness import Handle, SessionLab, session_laboratory

from exec_wire import Call, Limits, Result, pack, unpack_result
from exec_wire.queue.memory import MemoryQueue
from exec_wire.queue.protocol import Job
from worker.consumer import Consumer
from worker.slots import Claim, Slots

PATIENCE_S = 30


@pytest.fixture(scope="module")
async def lab() -> AsyncIterator[SessionLab]:
    async with session_laboratory(slots=1) as lab:
        yield lab


class Calls:
    """The gateway's side of a queue."""

    def __init__(self, queue: MemoryQueue) -> None:
        self._end = queue.gateway("g")
        self._sent = 0

    async def send(self, count: int, call: Call, remaining_s: float = 120.0, **fields: Any) -> None:
        self._sent += count
        payload = pack(call)
        first = self._sent
        jobs = [Job(f"j{first + n}", payload, round(remaining_s * 1000), "g", **fields) for n in range(count)]
        await self._end.publish(jobs)

    async def answers(self, count: int) -> list[Result]:
        found: list[Result] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < count:
                found += [unpack_result(answer.payload) for answer in await self._end.receive()]
        return found


def call(code: str = "pass", **fields: Any) -> Call:
    return Call(code=code, limits=Limits(wall_s=20), **fields)


@asynccontextmanager
async def worker_of(lab: SessionLab) -> AsyncIterator[Calls]:
    queue = MemoryQueue()
    async with Consumer("w", lab.pool, queue.worker("w"), lab.sessions):
        yield Calls(queue)


@contextmanager
def cells_for_ever(sessions: list[Handle], ran: Counter[str]) -> Iterator[None]:
    """Each session asks for its next cell as soon as it has the result of the last one."""

    async def run(session: Handle) -> None:
        while True:
            await session.ok("pass")
            ran[session.tenant] += 1

    tasks = [asyncio.create_task(run(session)) for session in sessions]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def cells_beside(lab: SessionLab, sessions: list[Handle], count: int, kind: Call, **fields: Any) -> int:
    """How many cells of these sessions run while so many calls are answered."""
    ran: Counter[str] = Counter()
    async with worker_of(lab) as calls:
        with cells_for_ever(sessions, ran):
            await until(lambda: ran.total() > 4, "cells to run")
            before = ran.total()
            await calls.send(count, kind, **fields)
            assert [result.status for result in await calls.answers(count)] == ["ok"] * count
            return ran.total() - before


async def test_calls_of_one_tenant_get_as_many_slots_as_the_cells_of_another(lab: SessionLab) -> None:
    sessions = [await lab.create(tenant="a") for _ in range(4)]
    assert 10 <= await cells_beside(lab, sessions, 20, call(tenant="b")) <= 30


async def test_tenants_share_the_slots_by_weight_whether_they_have_cells_or_calls(lab: SessionLab) -> None:
    sessions = [await lab.create(tenant="a") for _ in range(4)]
    assert 4 <= await cells_beside(lab, sessions, 32, call(tenant="b"), weight=4.0) <= 16


async def test_cells_of_bulk_sessions_give_way_to_calls_for_training_and_do_not_starve(lab: SessionLab) -> None:
    sessions = [await lab.create(tenant="a", priority="bulk") for _ in range(4)]
    assert 1 <= await cells_beside(lab, sessions, 48, call(tenant="b")) <= 12


async def test_forks_have_the_priority_of_their_session(lab: SessionLab) -> None:
    session = await lab.create(priority="eval")
    [fork] = await session.fork()
    assert fork.session.spec.priority == "eval"


async def test_within_a_tenant_a_call_that_has_waited_longer_comes_before_a_cell(lab: SessionLab) -> None:
    """As in a line of many calls, most of which still wait in the gateway."""
    sessions = [await lab.create() for _ in range(4)]
    assert await cells_beside(lab, sessions, 20, call(), waited_ms=60_000) <= 8


async def test_call_that_waits_beside_cells_expires_at_its_deadline(lab: SessionLab) -> None:
    busy, waiting = await lab.create(), await lab.create()
    async with worker_of(lab) as calls:
        running = asyncio.create_task(busy.run("import time\ntime.sleep(60)", wall_s=60))
        await until(lambda: busy.session.running, "the cell to run")
        cell = asyncio.create_task(waiting.ok("pass"))
        await until(lambda: waiting.session.pending, "a cell to wait")
        await calls.send(1, call(tenant="b"), remaining_s=0.3)
        [result] = await calls.answers(1)
        assert (result.status, result.blame) == ("expired", "infra")
        await busy.interrupt()
        await running
        await cell


async def test_cell_whose_deadline_has_passed_is_not_started_though_a_slot_is_free(lab: SessionLab) -> None:
    session = await lab.create()
    with pytest.raises(TimeoutError):
        async with lab.pool.slot_for_cell(Claim("", "train", 1.0, is_cell=True), 0):
            pytest.fail("it has a slot")
    assert lab.pool.free_slots == 1
    await session.delete()


async def test_cell_of_a_session_that_ends_while_it_waits_is_refused_and_not_blamed(lab: SessionLab) -> None:
    session = await lab.create()
    slot = lab.pool.take_slot()
    running = asyncio.create_task(session.refused("pass"))
    await until(lambda: lab.pool.cells_waiting == 1, "it waits")
    session.session.member.kill()
    await until(lambda: not session.session.alive, "it has ended")
    lab.pool.give_back(slot)
    assert (await running).code in ("session_ended", "no_such_session", "session_lost")
    await until(lambda: lab.pool.free_slots == 1, "the slot to be free")


async def test_slot_of_a_cell_that_is_given_up_while_it_waits_goes_to_the_next(lab: SessionLab) -> None:
    sessions = [await lab.create() for _ in range(3)]
    slot = lab.pool.take_slot()
    tasks = [asyncio.create_task(session.ok("pass")) for session in sessions]
    await until(lambda: lab.pool.cells_waiting == 3, "all to wait")
    tasks[0].cancel()
    lab.pool.give_back(slot)  # before the cancelled one has noticed
    tasks[1].cancel()
    assert (await tasks[2]).status == "ok"
    await until(lambda: lab.pool.free_slots == 1, "the slot to be free")
    assert lab.pool.cells_waiting == 0


# -- how many jobs are held ---------------------------------------------------------------------------------------------------


class Used:
    """Slots that are taken and given back in order, on a clock that the test moves."""

    def __init__(self, slots: int) -> None:
        self.now = 1000.0
        self.slots = Slots(slots, lambda: self.now)
        self._taken = [self.slots.take_slot() for _ in range(slots)]

    def run(self, count: int, slot_s: float) -> None:
        """So many programs, of which each takes so long, always one in every slot."""
        for _ in range(count):
            self.now += slot_s / self.slots.slots
            self.slots.give_back(self._taken.pop(0))
            self._taken.append(self.slots.take_slot())


@pytest.mark.parametrize(("slot_s", "held"), [(0.001, 6), (0.012, 5), (0.020, 3), (0.050, 1), (0.070, 0), (10.0, 0)])
def test_a_worker_holds_what_starts_within_ten_milliseconds_and_at_most_one_per_slot(slot_s: float, held: int) -> None:
    used = Used(6)
    assert used.slots.to_hold == 0  # nothing is known yet
    used.run(100, slot_s * 0.999)
    assert used.slots.to_hold == held


def test_a_worker_whose_slots_have_all_been_taken_for_long_holds_nothing() -> None:
    used = Used(6)
    used.run(100, 0.012)
    used.now += 0.005
    assert used.slots.to_hold == 2
    used.now += 0.006
    assert used.slots.to_hold == 0
    used.run(1, 0.0)
    assert used.slots.to_hold >= 4


def test_a_worker_holds_nothing_after_one_long_program_and_holds_again_after_many_short_ones() -> None:
    used = Used(6)
    used.run(100, 0.012)
    used.run(1, 600.0)
    assert used.slots.to_hold == 0
    used.run(100, 0.012)
    assert used.slots.to_hold > 0
