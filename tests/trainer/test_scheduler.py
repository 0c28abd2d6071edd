"""Where rollouts go: by the room that engines have and report, with shared prompts and groups that stay together."""

import asyncio

from common import PATIENCE_S, until

from grpo_roc import config
from grpo_roc.engines.base import Generated, Load, Sampling
from grpo_roc.engines.placement import Placement, Rollout, Room
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.weights import Weights

# -- placement: a table without engines -----------------------------------------------------------------------------------


def _rooms(*loads: Load) -> list[Room]:
    rooms = [Room() for _ in loads]
    for room, load in zip(rooms, loads, strict=True):
        room.report(load)
    return rooms


def _place(placement: Placement, rooms: list[Room], rollouts: list[Rollout]) -> list[int | None]:
    """The number of each rollout's engine."""
    found: list[int | None] = []
    for rollout in rollouts:
        room = placement.choose(rooms, rollout)
        if room is not None:
            room.add(rollout, placement.expected(rollout))
        found.append(None if room is None else rooms.index(room))
    return found


def _of_prompt(number: int, count: int, prompt: int = 64, max_new: int = 36) -> list[Rollout]:
    return [Rollout([number] * prompt, max_new) for _ in range(count)]


SAFE = config.Scheduler(mode="dynamic", reserve="safe", util=1.0)
ADAPTIVE = config.Scheduler(mode="dynamic", reserve="adaptive", util=1.0)


def test_the_blocks_of_a_shared_prompt_count_once() -> None:
    shared, apart = _rooms(Load(512, 0, 0, 0, 0, block=16)), _rooms(Load(512, 0, 0, 0, 0))
    # 100 tokens are 7 blocks, of which 4 are the prompt's: 112 for the first rollout, 48 for each other.
    assert _place(Placement(SAFE), shared, _of_prompt(1, 10)) == [0] * 9 + [None]
    assert shared[0].reserved == 112 + 8 * 48
    assert _place(Placement(SAFE), apart, _of_prompt(1, 10)) == [0] * 5 + [None] * 5
    for rollout in list(shared[0].rollouts):
        shared[0].remove(rollout)
    assert shared[0].reserved == 0


def test_rollouts_of_other_prompts_share_nothing() -> None:
    rooms = _rooms(Load(512, 0, 0, 0, 0, block=16))
    assert _place(Placement(SAFE), rooms, [_of_prompt(number, 1)[0] for number in range(6)]) == [0] * 4 + [None] * 2


def test_a_group_stays_on_one_engine_until_that_is_much_fuller() -> None:
    rooms = _rooms(*[Load(1600, 0, 0, 0, 0, block=16)] * 2)
    placement = Placement(SAFE)
    # Each engine gets a group, not half of both.
    assert _place(placement, rooms, [*_of_prompt(1, 5), *_of_prompt(2, 5)]) == [0] * 5 + [1] * 5
    # A quarter of the cache is 400 tokens: 112 + 48 n stays within it for seven rollouts, and an eighth one is sent.
    alone = _rooms(*[Load(1600, 0, 0, 0, 0, block=16)] * 2)
    assert _place(Placement(SAFE), alone, _of_prompt(1, 10)) == [0] * 8 + [1, 1]


def test_no_rollout_goes_to_an_engine_that_lets_requests_wait() -> None:
    rooms = _rooms(Load(10_000, 100, 4, 2, 0), Load(1_000, 100, 4, 0, 0))
    for room in rooms:
        room.add(Rollout([0], 99), 100)
    assert _place(Placement(SAFE), rooms, _of_prompt(1, 2)) == [1, 1]
    rooms[1].report(Load(1_000, 300, 4, 1, 0))
    assert _place(Placement(SAFE), rooms, _of_prompt(1, 1)) == [None]
    rooms[0].report(Load(10_000, 100, 4, 0, 0))
    assert _place(Placement(SAFE), rooms, _of_prompt(1, 1)) == [0]


def test_tokens_of_other_clients_leave_less_room() -> None:
    rooms = _rooms(Load(1_000, 850, 4, 0, 0), Load(1_000, 300, 9, 0, 0))
    assert _place(Placement(SAFE), rooms, _of_prompt(1, 12)) == [1] * 6 + [0, 1] + [None] * 4


def test_adaptive_expects_what_rollouts_of_that_length_came_to() -> None:
    placement, (room,) = Placement(ADAPTIVE), _rooms(Load(10_000, 0, 0, 0, 0))
    rollout = Rollout([1] * 20, 80)
    assert placement.expected(rollout) == 100
    for response in [10] * 12 + [50] * 4:
        ended = Rollout([1] * 5, 80)
        ended.length += response
        placement.ended(room, ended)
    assert placement.expected(rollout) == 20 + 20 and room.overcommit > 1
    rollout.length += 30
    assert placement.expected(rollout) == 20 + 50
    rollout.length += 40
    assert placement.expected(rollout) == 100  # none was so long


def test_a_preemption_that_an_engine_reports_leaves_more_of_its_cache_free() -> None:
    (room,) = _rooms(Load(1_000, 0, 0, 0, 7))
    room.add(Rollout([1], 9), 10)
    before = room.free(1.0)
    room.report(Load(1_000, 0, 0, 0, 8))
    assert room.free(1.0) < 0.75 * before
    after = room.free(1.0)
    room.report(Load(1_000, 0, 0, 0, 8))
    assert room.free(1.0) == after


# -- the scheduler --------------------------------------------------------------------------------------------------------


class _Engine:
    """Holds requests until they are let go, and counts what it holds."""

    direct = False

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.held: dict[str, int] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.most = 0
        self.waiting = 0

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        self.held[request_id] = len(ids) + sampling.max_new
        self.most = max(self.most, sum(self.held.values()))
        await self.gates.setdefault(request_id, asyncio.Event()).wait()
        return Generated([1], [0.0], "stop")

    async def release(self, request_id: str) -> None:
        self.held.pop(request_id)

    async def load(self) -> Load:
        return Load(self.capacity, sum(self.held.values()), len(self.held), self.waiting, 0)

    async def update_weights(self, weights: Weights) -> None: ...
    async def sleep(self) -> None: ...
    async def check(self) -> None: ...
    async def aclose(self) -> None: ...


async def _run_all(scheduler: Scheduler, engines: list[_Engine], count: int) -> None:
    async def one(number: int) -> None:
        await scheduler.generate(str(number), [1] * 20, Sampling(80))
        await scheduler.release(str(number))

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        while not all(task.done() for task in tasks):
            for engine in engines:
                for gate in list(engine.gates.values())[:3]:
                    gate.set()
                engine.gates = {name: gate for name, gate in engine.gates.items() if not gate.is_set()}
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    await scheduler.aclose()


async def test_dynamic_never_promises_more_than_an_engine_can_hold() -> None:
    engines = [_Engine("small", 250), _Engine("large", 1000)]
    await _run_all(Scheduler(engines, config.Scheduler(reserve="safe", util=1.0, poll_s=0.01)), engines, 40)
    assert [engine.most for engine in engines] == [200, 1000]


async def test_static_deals_evenly_and_overflows() -> None:
    engines = [_Engine("small", 250), _Engine("large", 1000)]
    scheduler = Scheduler(engines, config.Scheduler(mode="static"))
    await _run_all(scheduler, engines, 40)
    assert [tracked.served for tracked in scheduler.engines] == [20, 20] and engines[0].most > 250


async def test_least_inflight_sends_to_the_engine_with_fewer_rollouts() -> None:
    engines = [_Engine("a", 250), _Engine("b", 250)]
    scheduler = Scheduler(engines, config.Scheduler(mode="least_inflight"))
    tasks = [asyncio.create_task(scheduler.generate(str(n), [1], Sampling(5))) for n in range(6)]
    await until(lambda: sum(len(engine.held) for engine in engines) == 6)
    assert [len(engine.held) for engine in engines] == [3, 3]
    for gate in engines[1].gates.values():
        gate.set()
    await asyncio.gather(*[tasks[n] for n in range(6) if str(n) in engines[1].held])
    for name in list(engines[1].held):
        await scheduler.release(name)
    tasks += [asyncio.create_task(scheduler.generate(f"late{n}", [1], Sampling(5))) for n in range(3)]
    await until(lambda: sum(len(engine.held) for engine in engines) == 6)
    assert [len(engine.held) for engine in engines] == [3, 3]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await scheduler.aclose()


async def test_all_turns_of_a_rollout_stay_on_one_engine() -> None:
    engines = [_Engine("a", 1000), _Engine("b", 1000)]
    scheduler = Scheduler(engines, config.Scheduler())
    for engine in engines:
        engine.gates = {name: asyncio.Event() for name in "xy"}
        for gate in engine.gates.values():
            gate.set()
    for ids in ([1] * 10, [1] * 30):
        await scheduler.generate("x", ids, Sampling(5))
        await scheduler.generate("y", ids, Sampling(5))
    assert [set(engine.held) for engine in engines] in ([{"x"}, {"y"}], [{"y"}, {"x"}])


async def test_a_rollout_that_fits_nowhere_runs_alone() -> None:
    engines = [_Engine("a", 50)]
    await _run_all(Scheduler(engines, config.Scheduler()), engines, 3)
    assert engines[0].most == 100


async def test_rollouts_wait_until_the_engine_reports_that_none_of_its_requests_waits() -> None:
    engine = _Engine("a", 10_000)
    scheduler = Scheduler([engine], config.Scheduler(poll_s=0.01))
    engine.waiting = 1
    tasks = [asyncio.create_task(scheduler.generate(str(n), [1] * 20, Sampling(80))) for n in range(3)]
    await until(lambda: engine.held)
    await asyncio.sleep(0.1)
    assert list(engine.held) == ["0"]  # an engine that is full of others' requests takes one
    engine.waiting = 0
    for name in "012":
        engine.gates.setdefault(name, asyncio.Event()).set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    await scheduler.aclose()


async def test_a_cancelled_rollout_leaves_the_queue() -> None:
    engine = _Engine("a", 100)
    scheduler = Scheduler([engine], config.Scheduler(reserve="safe", util=1.0))
    first = asyncio.create_task(scheduler.generate("1", [1] * 20, Sampling(80)))
    second = asyncio.create_task(scheduler.generate("2", [1] * 20, Sampling(80)))
    await until(lambda: "1" in engine.gates and scheduler._waiting)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    engine.gates["1"].set()
    await first
    await scheduler.release("1")
    assert not scheduler._waiting and scheduler.engines[0].reserved == 0
    await scheduler.aclose()
