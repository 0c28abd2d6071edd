"""Two local engines, rollouts of heavy-tailed lengths, tools that take a while: how long until all are done?

Real engines with a real, small cache; only the clock is made up, since two engines share this machine's cores: one tick is one
step of both, as of two GPUs side by side. A step reads at most `prefill_tokens` new tokens, so computing again what was evicted
takes ticks. The engines admit whatever fits and evict half of what runs when they overflow, as the paper describes them; a
second table is of engines that keep some room free (`headroom`). Lengths and tool times are drawn once per rollout and are the
same for every mode. Everything is decided by the seed, the forward pass included.
"""

from __future__ import annotations

import math
import random
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tqdm import tqdm

from grpo_roc import config
from grpo_roc import model as tiny
from grpo_roc.engines.base import Sampling
from grpo_roc.engines.local import LocalEngine

RATIOS = ((1, 2), (1, 3), (1, 4))  # of the engines' capacities
EXTRA = ((1, 1),)  # for the whole picture
TOTAL = 8192  # tokens of cache, both engines together
PROMPT, LONGEST, TURNS, OBSERVATION = 64, 256, 4, 8
MODES = ("static, turn barrier", "static", "least_inflight", "dynamic, safe", "dynamic, adaptive")


class Plan(NamedTuple):
    """What a rollout will do: tokens of each turn, and how many ticks its tool takes after it."""

    turns: list[int]
    tools: list[int]

    @property
    def longest(self) -> int:
        return PROMPT + LONGEST


class Outcome(NamedTuple):
    makespan: int
    evictions: int
    recomputed: int
    read: int
    busy: float
    p50: int
    p99: int


def plans(count: int, seed: int) -> list[Plan]:
    """Log-normal lengths: most are short, a few take all that they may."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        number = rng.randint(1, TURNS)
        total = min(LONGEST - OBSERVATION * number, max(2 * number, int(rng.lognormvariate(math.log(110), 0.8))))
        cuts = sorted(rng.sample(range(1, total), number - 1))
        turns = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        made.append(Plan(turns, [1 + int(rng.expovariate(1 / 12)) for _ in turns[:-1]]))
    return made


class _Walker:
    def __init__(self, number: int, plan: Plan) -> None:
        self.name, self.plan, self.turn = f"r{number}", plan, 0
        self.ids = [1 + (number * 7 + place) % 50 for place in range(PROMPT)]
        self.engine: LocalEngine | None = None
        self.request: object = None
        self.ready_at = 0
        self.done_at = -1

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.plan.turns[self.turn], 1.0, (), (int(self.name[1:]), self.turn))


def play(mode: str, ratio: tuple[int, int], made: list[Plan], *, headroom: int = 1) -> Outcome:
    engines = _engines(ratio, headroom)
    walkers = [_Walker(number, plan) for number, plan in enumerate(made)]
    placing = _Placing(mode, engines)
    waiting, active, tick, busy = deque(walkers), list[_Walker](), 0, 0
    barrier = mode.endswith("barrier")
    while waiting or active:
        active += placing.admit(waiting)
        _send(active, tick, barrier, placing)
        for engine in engines:
            if engine.busy:
                engine.step()
                busy += 1
        tick += 1
        for walker in _finished(active):
            _after_turn(walker, tick, placing)
        active = [walker for walker in active if walker.done_at < 0]
    times = sorted(walker.done_at for walker in walkers)
    return Outcome(
        tick,
        sum(engine.evictions for engine in engines),
        sum(engine.recomputed_tokens for engine in engines),
        sum(engine.read_tokens for engine in engines),
        busy / (tick * len(engines)),
        times[len(times) // 2],
        times[int(0.99 * (len(times) - 1))],
    )


def _engines(ratio: tuple[int, int], headroom: int) -> list[LocalEngine]:
    model = tiny.make_model(config.Model(hidden=32, layers=1, heads=2, kv_heads=1, ffn=32), 64, 512, 0)
    return [
        LocalEngine(
            model.config,
            model.state_dict(),
            config.Engine(
                max_len=512, capacity=TOTAL * part // sum(ratio), slots=4096, prefill_tokens=128, mixed=False, headroom=headroom
            ),
            f"engine {number}",
        )
        for number, part in enumerate(ratio)
    ]


def _send(active: list[_Walker], tick: int, barrier: bool, placing: _Placing) -> None:
    """Next turns of those whose tool has answered; with a barrier only when nobody is in the middle of a turn."""
    idle = [walker for walker in active if walker.request is None]
    if barrier and (len(idle) < len(active) or any(walker.ready_at > tick for walker in idle)):
        return
    for walker in idle:
        if walker.ready_at <= tick and placing.may_speak(walker):
            assert walker.engine is not None
            walker.request = walker.engine.submit(walker.name, walker.ids, walker.sampling)


def _finished(active: list[_Walker]) -> list[_Walker]:
    return [walker for walker in active if getattr(walker.request, "result", None)]


def _after_turn(walker: _Walker, tick: int, placing: _Placing) -> None:
    assert walker.engine is not None
    placing.spoke(walker)
    walker.ids = [*walker.request.ids]  # type: ignore[attr-defined]
    walker.request = None
    if walker.turn + 1 == len(walker.plan.turns):
        walker.done_at = tick
        walker.engine.drop(walker.name)
        placing.release(walker)
        return
    walker.ready_at = tick + walker.plan.tools[walker.turn]
    walker.ids += [1 + place % 50 for place in range(OBSERVATION)]
    walker.turn += 1


class _Placing:
    """`grpo_roc.engines.scheduler`'s rules on a made-up clock: its table of seats, without an event loop."""

    def __init__(self, mode: str, engines: list[LocalEngine]) -> None:
        from grpo_roc.engines.scheduler import Scheduler

        name = mode.partition(",")[0]
        reserve = "adaptive" if "adaptive" in mode else "safe"
        self._rules = Scheduler(engines, msgspec.convert({"mode": name, "reserve": reserve, "util": 1.0}, config.Scheduler))
        for seat, engine in zip(self._rules.seats, engines, strict=True):
            seat.capacity = engine.settings.capacity
        self._evictions = dict.fromkeys((engine.name for engine in engines), 0)

    def admit(self, waiting: deque[_Walker]) -> list[_Walker]:
        admitted = []
        self._notice_evictions()
        while waiting and (seat := self._rules.try_place(waiting[0].name, PROMPT, LONGEST)):
            walker = waiting.popleft()
            walker.engine = seat.engine  # type: ignore[assignment]
            admitted.append(walker)
        return admitted

    def may_speak(self, walker: _Walker) -> bool:
        return self._rules.try_turn(walker.name, len(walker.ids), PROMPT + LONGEST - len(walker.ids))

    def spoke(self, walker: _Walker) -> None:
        self._rules.end_turn(walker.name, len(walker.ids), walker.plan.turns[walker.turn])

    def release(self, walker: _Walker) -> None:
        self._rules.forget(walker.name, len(walker.ids))

    def _notice_evictions(self) -> None:
        for seat in self._rules.seats:
            now = seat.engine.evictions  # type: ignore[attr-defined]
            if now > self._evictions[seat.engine.name]:
                self._rules.shrink(seat)
            self._evictions[seat.engine.name] = now


def run(settings: config.Config, out: Path | None, count: int) -> str:
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    made = plans(count, seed=0)
    lines = [
        f"{count} rollouts, prompt {PROMPT}, up to {TURNS} turns and {LONGEST} tokens (log-normal, mean "
        f"{sum(sum(plan.turns) for plan in made) / count:.0f}), tools 1 + Exp(12) ticks, {TOTAL} tokens of cache in all.",
        *_table("Engines that admit whatever fits", (*RATIOS, *EXTRA), made, 1),
        *_table("Engines that keep 16 tokens free for each request that runs", (*RATIOS, *EXTRA), made, 16),
    ]
    words = "\n".join(lines) + "\n"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(words)
    return words


def _table(title: str, ratios: tuple[tuple[int, int], ...], made: list[Plan], headroom: int) -> list[str]:
    lines = [
        "",
        f"{title}:",
        "",
        "| capacities | mode | makespan, ticks | x dynamic, adaptive | evictions | computed again | busy | p50 | p99 |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for ratio in ratios:
        found = {mode: play(mode, ratio, made, headroom=headroom) for mode in tqdm(MODES, desc=f"{ratio[0]}:{ratio[1]}")}
        best = found["dynamic, adaptive"].makespan
        for mode, one in found.items():
            lines.append(
                f"| {ratio[0]}:{ratio[1]} | {mode} | {one.makespan} | {one.makespan / best:.2f} | {one.evictions} | "
                f"{one.recomputed} ({one.recomputed / one.read:.0%}) | {one.busy:.2f} | {one.p50} | {one.p99} |"
            )
    return lines
