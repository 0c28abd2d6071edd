"""Compare schedulers: two local engines, rollouts of heavy-tailed lengths, slow tools; how long until all are done?

The engines and their small KV caches are real. Time is simulated, because both engines share this machine's cores: one tick is
one step of both, as on two GPUs. A step reads at most `prefill_tokens` new tokens, so recomputing evicted ones takes ticks. In
the first table engines admit all that fits and evict half of the running requests on overflow, as the paper describes; in the
second they keep some room free (`headroom`). Lengths and tool times are drawn once per rollout and are the same in every mode.
The result depends on the seed alone.
"""

import math
import random
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from tqdm import tqdm

from grpo_roc import config
from grpo_roc.engines.base import Sampling
from grpo_roc.engines.local import LocalEngine, Request
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.model import make_model

RATIOS = ((1, 2), (1, 3), (1, 4), (1, 1))  # of the engines' capacities
TOTAL = 8192  # tokens of cache, both engines together
PROMPT, LONGEST, TURNS, OBSERVATION = 64, 256, 4, 8
MODES = ("static, turn barrier", "static", "least_inflight", "dynamic, safe", "dynamic, adaptive")


class Plan(NamedTuple):
    """A rollout's course: the tokens of each turn, and the ticks of the tool call after it."""

    turns: list[int]
    tools: list[int]


def plans(count: int, seed: int) -> list[Plan]:
    """Log-normal lengths: most rollouts are short, a few reach the limit."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        number = rng.randint(1, TURNS)
        total = min(LONGEST - OBSERVATION * number, max(2 * number, int(rng.lognormvariate(math.log(110), 0.8))))
        cuts = sorted(rng.sample(range(1, total), number - 1))
        turns = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        made.append(Plan(turns, [1 + int(rng.expovariate(1 / 12)) for _ in turns[:-1]]))
    return made


class Outcome(NamedTuple):
    makespan: int
    evictions: int
    recomputed: int
    read: int
    busy: float
    p50: int
    p99: int


class _Rollout:
    def __init__(self, number: int, plan: Plan) -> None:
        self.number, self.name, self.plan, self.turn = number, f"r{number}", plan, 0
        self.ids = [1 + (number * 7 + place) % 50 for place in range(PROMPT)]
        self.engine: LocalEngine
        self.request: Request | None = None
        self.ready_at = 0
        self.done_at = -1


class _Simulation:
    """The scheduler's rules, driven by ticks instead of an event loop."""

    def __init__(self, mode: str, engines: list[LocalEngine], rollouts: list[_Rollout]) -> None:
        self.engines, self.waiting, self.tick = engines, deque(rollouts), 0
        self.active: list[_Rollout] = []
        self._barrier = mode.endswith("barrier")
        settings = {"mode": mode.partition(",")[0], "reserve": "adaptive" if "adaptive" in mode else "safe", "util": 1.0}
        self._rules = Scheduler(engines, msgspec.convert(settings, config.Scheduler))
        for tracked, engine in zip(self._rules.engines, engines, strict=True):
            tracked.capacity = engine.settings.capacity

    def step(self) -> int:
        """One tick; returns the number of engines that worked."""
        self._admit()
        self._start_turns()
        busy = [engine for engine in self.engines if engine.busy]
        for engine in busy:
            engine.step()
        self.tick += 1
        for rollout in self.active:
            if rollout.request is not None and rollout.request.result:
                self._end_turn(rollout, rollout.request)
        self.active = [rollout for rollout in self.active if rollout.done_at < 0]
        return len(busy)

    def _admit(self) -> None:
        for tracked, engine in zip(self._rules.engines, self.engines, strict=True):
            if engine.evictions > tracked.preempted:
                self._rules.shrink(tracked)
            tracked.preempted = engine.evictions
        while self.waiting and (assigned := self._rules.try_assign(self.waiting[0].name, PROMPT, LONGEST)):
            rollout = self.waiting.popleft()
            rollout.engine = assigned.engine  # type: ignore[assignment]
            self.active.append(rollout)

    def _start_turns(self) -> None:
        """Start the turns whose tool has answered; with a barrier, only when no turn is in progress."""
        idle = [rollout for rollout in self.active if rollout.request is None]
        if self._barrier and (len(idle) < len(self.active) or any(rollout.ready_at > self.tick for rollout in idle)):
            return
        for one in idle:
            left = PROMPT + LONGEST - len(one.ids)
            if one.ready_at <= self.tick and self._rules.try_turn(one.name, len(one.ids), left):
                sampling = Sampling(one.plan.turns[one.turn], 1.0, (), (one.number, one.turn))
                one.request = one.engine.submit(one.name, one.ids, sampling)

    def _end_turn(self, one: _Rollout, request: Request) -> None:
        self._rules.end_turn(one.name, len(one.ids), one.plan.turns[one.turn])
        one.ids, one.request = [*request.ids], None
        if one.turn + 1 == len(one.plan.turns):
            one.done_at = self.tick
            one.engine.drop(one.name)
            self._rules.end_rollout(one.name, len(one.ids))
            return
        one.ready_at = self.tick + one.plan.tools[one.turn]
        one.ids += [1 + place % 50 for place in range(OBSERVATION)]
        one.turn += 1


def simulate(mode: str, ratio: tuple[int, int], made: list[Plan], *, headroom: int = 1) -> Outcome:
    engines = _engines(ratio, headroom)
    rollouts = [_Rollout(number, plan) for number, plan in enumerate(made)]
    simulation, busy = _Simulation(mode, engines, rollouts), 0
    while simulation.waiting or simulation.active:
        busy += simulation.step()
    times = sorted(rollout.done_at for rollout in rollouts)
    return Outcome(
        simulation.tick,
        sum(engine.evictions for engine in engines),
        sum(engine.recomputed_tokens for engine in engines),
        sum(engine.read_tokens for engine in engines),
        busy / (simulation.tick * len(engines)),
        times[len(times) // 2],
        times[int(0.99 * (len(times) - 1))],
    )


def _engines(ratio: tuple[int, int], headroom: int) -> list[LocalEngine]:
    model = make_model(config.Model(hidden=32, layers=1, heads=2, kv_heads=1, ffn=32), 64, 512, 0)
    base = config.Engine(max_len=512, slots=4096, prefill_tokens=128, mixed=False, headroom=headroom)
    settings = [msgspec.structs.replace(base, capacity=TOTAL * part // sum(ratio)) for part in ratio]
    return [LocalEngine(model.config, model.state_dict(), one, f"engine {n}") for n, one in enumerate(settings)]


def run(settings: config.Config, out: Path | None, count: int) -> str:
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    made = plans(count, seed=0)
    lines = [
        f"{count} rollouts, prompt {PROMPT}, up to {TURNS} turns and {LONGEST} tokens (log-normal, mean "
        f"{sum(sum(plan.turns) for plan in made) / count:.0f}), tools 1 + Exp(12) ticks, {TOTAL} tokens of cache in all.",
        *_table("Engines that admit all that fits", made, 1),
        *_table("Engines that keep 16 tokens free for each running request", made, 16),
    ]
    text = "\n".join(lines) + "\n"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    return text


def _table(title: str, made: list[Plan], headroom: int) -> list[str]:
    lines = [
        "",
        f"{title}:",
        "",
        "| capacities | mode | makespan, ticks | x dynamic, adaptive | evictions | recomputed | busy | p50 | p99 |",
        "| --- | --- |" + " ---: |" * 7,
    ]
    for ratio in RATIOS:
        found = {mode: simulate(mode, ratio, made, headroom=headroom) for mode in tqdm(MODES, desc=f"{ratio[0]}:{ratio[1]}")}
        best = found["dynamic, adaptive"].makespan
        for mode, one in found.items():
            lines.append(
                f"| {ratio[0]}:{ratio[1]} | {mode} | {one.makespan} | {one.makespan / best:.2f} | {one.evictions} | "
                f"{one.recomputed} ({one.recomputed / one.read:.0%}) | {one.busy:.2f} | {one.p50} | {one.p99} |"
            )
    return lines
