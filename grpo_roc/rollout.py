"""Rollouts: the model speaks, tools answer, until the model says nothing that asks for an answer.

Token in, token out: what the model said is never tokenized again, and what it heard is appended with mask 0. `run_async` lets
every rollout go its own way: each tool call leaves the moment it is produced. `run_lockstep` moves all of them turn by turn in
a fixed order, for runs that must come out the same every time; also there the tool calls of a turn run side by side.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from grpo_roc import chat
from grpo_roc.engines.base import Engine, Generated, Sampling
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import Heard, Place, ToolEnv
from grpo_roc.tasks.base import Problem


class Trajectory(msgspec.Struct):
    problem: str
    truth: str
    group: int
    sample: int
    prompt: list[int]
    ids: list[int] = msgspec.field(default_factory=list)
    mask: list[int] = msgspec.field(default_factory=list)  # 1: said by the model
    logprobs: list[float] = msgspec.field(default_factory=list)  # 0.0 where mask is 0
    entropies: list[float] = msgspec.field(default_factory=list)
    outcomes: list[str] = msgspec.field(default_factory=list)  # of its tool calls: ok, error, infra
    statuses: list[str] = msgspec.field(default_factory=list)
    answers: int = 0
    turns: int = 0
    truncated: bool = False
    reward: float | None = None  # None: unknown, and not the model's fault; never trained on
    tool_wait_s: float = 0.0
    preempted: int = 0

    @property
    def tokens(self) -> int:
        """Said by the model."""
        return sum(self.mask)

    @property
    def correct(self) -> bool:
        return self.reward is not None and self.reward > 0


class Limits(NamedTuple):
    turns: int
    max_response: int
    temperature: float
    tools: bool = True  # False: calls are answered with a refusal


class Codec:
    """The chat format in a tokenizer's ids."""

    def __init__(self, tokenizer: Any, system: str, opening: str) -> None:
        self._tokenizer, self._system, self._opening = tokenizer, system, opening
        self.stop = (tokenizer.convert_tokens_to_ids(chat.END),)

    def prompt(self, problem: str) -> list[int]:
        return self.ids(chat.prompt(problem, self._system, self._opening))

    def observation(self, texts: list[str]) -> list[int]:
        return self.ids(chat.observation(texts, self._opening))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


class _Rollout:
    """One trajectory on its way."""

    def __init__(self, problem: Problem, at: Place, codec: Codec, limits: Limits) -> None:
        self.at, self._codec, self._limits = at, codec, limits
        self.it = Trajectory(problem.id, problem.answer, at.group, at.sample, codec.prompt(problem.text))
        self.id = f"{at.step}-{at.group}-{at.sample}"
        self.over = False

    @property
    def context(self) -> list[int]:
        return self.it.prompt + self.it.ids

    @property
    def sampling(self) -> Sampling:
        left = self._limits.max_response - len(self.it.ids)
        seed = (self.at.seed, self.at.step, self.at.group, self.at.sample, self.it.turns)
        return Sampling(left, self._limits.temperature, self._codec.stop, seed)

    def say(self, said: Generated) -> list[chat.ToolCall | chat.ParseFailure]:
        """Take what the model said; what it asks for."""
        it = self.it
        it.ids += said.ids
        it.mask += [1] * len(said.ids)
        it.logprobs += said.logprobs
        it.entropies += said.entropies or [0.0] * len(said.ids)
        it.preempted += said.preempted
        it.turns += 1
        turn = chat.read_turn(self._codec.text(said.ids))
        it.answers += turn.answers
        if said.finish == "length":
            it.truncated = self.over = True
            return []
        self.over = not turn.calls
        return turn.calls

    def hear(self, heard: list[Heard]) -> None:
        """Take what the tools answered, and see whether there is room for another turn."""
        it = self.it
        it.outcomes += [one.outcome for one in heard]
        it.statuses += [one.status for one in heard]
        it.tool_wait_s += max(one.wait_s for one in heard)
        if any(one.outcome == "infra" for one in heard):
            self.over = True  # nobody knows what the program would have said
            return
        ids = self._codec.observation([one.text for one in heard])
        if it.turns >= self._limits.turns or len(it.ids) + len(ids) >= self._limits.max_response:
            it.truncated = self.over = True
            return
        it.ids += ids
        it.mask += [0] * len(ids)
        it.logprobs += [0.0] * len(ids)
        it.entropies += [0.0] * len(ids)

    async def ask(self, env: ToolEnv, calls: list[chat.ToolCall | chat.ParseFailure]) -> list[Heard]:
        if not self._limits.tools:
            return [Heard("there is no tool", "error", "disabled") for _ in calls]
        places = (self.at._replace(turn=self.it.turns, call=number) for number in range(len(calls)))
        return list(await asyncio.gather(*(env.run(call, at) for call, at in zip(calls, places, strict=True))))

    async def score(self, env: ToolEnv) -> Trajectory:
        """Rewards come from answers only; what was cut off keeps 0."""
        it = self.it
        if "infra" in it.outcomes:
            it.reward = None
        elif it.truncated:
            it.reward = 0.0
        else:
            spoken = [token for token, own in zip(it.ids, it.mask, strict=True) if own]
            it.reward = await env.reward(chat.final_answer(self._codec.text(spoken)), it.truth)
        return it


class Timings(msgspec.Struct):
    generate_s: float = 0.0
    tool_s: float = 0.0
    verify_s: float = 0.0


def _make(problems: Sequence[Problem], samples: int, at: Place, codec: Codec, limits: Limits) -> list[_Rollout]:
    return [
        _Rollout(problem, at._replace(group=group, sample=sample), codec, limits)
        for group, problem in enumerate(problems)
        for sample in range(samples)
    ]


async def run_lockstep(
    problems: Sequence[Problem],
    samples: int,
    *,
    engine: LocalEngine,
    env: ToolEnv,
    codec: Codec,
    limits: Limits,
    at: Place,
    timings: Timings | None = None,
) -> list[Trajectory]:
    """`samples` rollouts of each problem, in that order."""
    timings = timings or Timings()
    rollouts = _make(problems, samples, at, codec, limits)
    while active := [rollout for rollout in rollouts if not rollout.over]:
        clock = time.monotonic()
        said = engine.generate_all([(rollout.id, rollout.context, rollout.sampling) for rollout in active])
        asked = [(rollout, rollout.say(words)) for rollout, words in zip(active, said, strict=True)]
        timings.generate_s, clock = timings.generate_s + time.monotonic() - clock, time.monotonic()
        asked = [(rollout, calls) for rollout, calls in asked if not rollout.over]
        answers = await asyncio.gather(*(rollout.ask(env, calls) for rollout, calls in asked))
        for (rollout, _), heard in zip(asked, answers, strict=True):
            rollout.hear(heard)
        timings.tool_s += time.monotonic() - clock
        for rollout in active:
            if rollout.over:
                engine.drop(rollout.id)
    clock = time.monotonic()
    scored = await asyncio.gather(*(rollout.score(env) for rollout in rollouts))
    timings.verify_s += time.monotonic() - clock
    return scored


async def run_async(
    problems: Sequence[Problem],
    samples: int,
    *,
    engine: Engine,
    env: ToolEnv,
    codec: Codec,
    limits: Limits,
    at: Place,
    timings: Timings | None = None,
) -> list[Trajectory]:
    """The same, each at its own pace; `engine` is usually a scheduler over several."""
    timings = timings or Timings()
    rollouts = _make(problems, samples, at, codec, limits)
    clock = time.monotonic()
    scored = await asyncio.gather(*(_run_one(rollout, engine, env) for rollout in rollouts))
    timings.generate_s += time.monotonic() - clock
    timings.tool_s += sum(one.tool_wait_s for one in scored) / max(1, len(scored))
    return scored


async def _run_one(rollout: _Rollout, engine: Engine, env: ToolEnv) -> Trajectory:
    try:
        while not rollout.over:
            calls = rollout.say(await engine.generate(rollout.id, rollout.context, rollout.sampling))
            if not rollout.over:
                rollout.hear(await rollout.ask(env, calls))
    finally:
        await engine.release(rollout.id)
    return await rollout.score(env)
