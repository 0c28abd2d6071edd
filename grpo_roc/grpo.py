"""The loop: problems, rollouts, selection, one update. Read `GrpoLoop.step` first.

Everything a step does follows from (settings, seed, step, weights, optimizer). In lockstep mode that holds to the last bit, so
a run that was killed and resumed writes the same rows as one that was not.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_roc import config, metrics, roc
from grpo_roc.distributed import Team
from grpo_roc.engines.base import Engine
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import Place, ToolEnv
from grpo_roc.loss import policy_loss, row_weights, truncated_importance
from grpo_roc.policy import logprobs, pad
from grpo_roc.rollout import Codec, Limits, Timings, Trajectory, run_async, run_lockstep
from grpo_roc.tasks.base import Problem, Task

Row = dict[str, Any]


class Sample(NamedTuple):
    """What one selected rollout gives to the update."""

    ids: list[int]  # prompt and response
    mask: list[int]
    logprobs: list[float]  # of the engine
    advantage: float
    group: int

    @property
    def tokens(self) -> int:
        return sum(self.mask)


class Selected(NamedTuple):
    samples: list[Sample]
    kept: list[Trajectory]
    all0: int
    all1: int
    mixed: int


def choose(rollouts: Sequence[Trajectory], settings: config.Rl, step: int) -> Selected:
    """Reject groups that teach nothing, keep G of each other one, and give them advantages."""
    groups: dict[int, list[Trajectory]] = {}
    for one in rollouts:
        groups.setdefault(one.group, [])
        if one.reward is not None:  # unknown for a reason that is not the model's
            groups[one.group].append(one)
    samples: list[Sample] = []
    kept: list[Trajectory] = []
    equal = {0.0: 0, 1.0: 0}
    for number, group in groups.items():
        rewards = [one.reward or 0.0 for one in group]
        if roc.all_equal(rewards):
            equal[float(bool(rewards) and rewards[0] > 0)] += 1
            continue
        chosen = [group[index] for index in _select(group, settings, random.Random(f"{settings.seed}:{step}:{number}"))]
        kept += chosen
        gains = roc.advantages([one.reward or 0.0 for one in chosen], std=settings.std_advantage)
        samples += [_sample(one, gain) for one, gain in zip(chosen, gains, strict=True)]
    return Selected(samples, kept, equal[0.0], equal[1.0], len(groups) - equal[0.0] - equal[1.0])


def _select(group: Sequence[Trajectory], settings: config.Rl, rng: random.Random) -> list[int]:
    if settings.arm == "grpo":
        return list(range(len(group)))
    seen = [roc.Rollout(one.reward or 0.0, one.outcomes, one.answers, one.turns) for one in group]
    mode: roc.Mode = "uniform" if settings.arm == "uniform" else settings.roc
    return roc.select(
        seen, settings.group, rng, mode=mode, eps=settings.eps, min_neg=settings.min_neg, min_pos=settings.min_pos
    )


def _sample(one: Trajectory, advantage: float) -> Sample:
    nothing = len(one.prompt)
    return Sample(one.prompt + one.ids, [0] * nothing + one.mask, [0.0] * nothing + one.logprobs, advantage, one.group)


# -- learning -------------------------------------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    ids: Tensor  # (B, T)
    mask: Tensor
    engine: Tensor  # (B, T) log-probabilities
    advantages: Tensor  # (B,)
    weights: Tensor  # (B,)


def micro_batches(samples: Sequence[Sample], norm: Any, budget: int, world: int) -> list[MicroBatch]:
    """Neighbours of like length, as many as fit into `budget` padded tokens; a multiple of `world` of them."""
    weights = row_weights([one.tokens for one in samples], [one.group for one in samples], norm)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    parts: list[list[int]] = [[]]
    for index in order:
        if parts[-1] and (len(parts[-1]) + 1) * len(samples[index].ids) > budget:
            parts.append([])
        parts[-1].append(index)
    made = [_micro_batch([samples[i] for i in part], [weights[i] for i in part]) for part in parts]
    while len(made) % world:  # every rank runs as many forward passes as the others: sharded ones are collective
        made.append(_micro_batch([samples[order[0]]], [0.0]))
    return made


def _micro_batch(samples: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
    return MicroBatch(
        pad([one.ids for one in samples]),
        pad([one.mask for one in samples]),
        pad([one.logprobs for one in samples], torch.float32),
        torch.tensor([one.advantage for one in samples]),
        torch.tensor(weights),
    )


class Learner:
    """The model, its optimizer, and the update."""

    def __init__(self, model: Any, settings: config.Rl, team: Team) -> None:
        self.model, self._settings, self.team = model, settings, team
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._settings.lr,
            betas=(0.9, 0.95),
            weight_decay=self._settings.weight_decay,
        )

    def learning_rate(self, step: int) -> float:
        return self._settings.lr * min(1.0, (step + 1) / max(1, self._settings.warmup))

    def update(self, samples: Sequence[Sample], step: int) -> Row:
        """`updates_per_rollout` optimizer steps on the same rollouts; only from the second on can the clip act."""
        settings, device = self._settings, self.team.device.torch
        everything = micro_batches(samples, settings.loss_norm, settings.micro_tokens, self.team.world)
        own = [MicroBatch(*(part.to(device) for part in one)) for one in everything[self.team.rank :: self.team.world]]
        self.model.train()
        several = settings.updates_per_rollout > 1
        old = [self._logprobs(one).detach() if several or settings.is_cap else None for one in own]
        lr = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        totals = [0.0] * 5
        norm = 0.0
        for _ in range(settings.updates_per_rollout):
            for one, before in zip(own, old, strict=True):
                totals = [a + b for a, b in zip(totals, self._backward(one, before), strict=True)]
            self.team.sum_gradients(self.model)
            norm = _number(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss, ratio, low, high, tokens = self.team.sum(totals)
        return {
            "train/loss": loss,
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/ratio_mean": ratio / max(1.0, tokens),
            "train/clip_frac_low": low / max(1.0, tokens),
            "train/clip_frac_high": high / max(1.0, tokens),
            "train/tokens": tokens / settings.updates_per_rollout,
            "train/rows": len(samples),
        }

    def _logprobs(self, one: MicroBatch) -> Tensor:
        return logprobs(self.model, one.ids, one.mask, self._settings.temperature)

    def _backward(self, one: MicroBatch, before: Tensor | None) -> list[float]:
        now = self._logprobs(one)
        old = now.detach() if before is None else before
        mask, engine = one.mask[:, 1:].float(), one.engine[:, 1:]
        importance = truncated_importance(old, engine, mask, self._settings.is_cap) if self._settings.is_cap else None
        loss = policy_loss(now, old, mask, one.advantages, one.weights, self._settings.clip, importance)
        (loss.value * self.team.loss_scale).backward()
        real = float(one.weights.sum() > 0)  # what only fills up a rank's share is not counted
        return [float(loss.value.detach()), *(real * part for part in loss[1:])]


def _number(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


# -- a step ---------------------------------------------------------------------------------------------------------------


class GrpoLoop:
    """Rank 0 has an engine, an environment and a task; the other ranks only learn."""

    def __init__(
        self,
        settings: config.Config,
        learner: Learner,
        *,
        codec: Codec | None = None,
        task: Task | None = None,
        engine: Engine | None = None,
        env: ToolEnv | None = None,
    ) -> None:
        self.settings, self.learner, self.team = settings, learner, learner.team
        self.codec, self.task, self.engine, self.env = codec, task, engine, env

    async def step(self, step: int, limits: Limits | None = None) -> Row:
        rl, clock = self.settings.rl, time.monotonic()
        row: Row = {"step": step}
        chosen: list[Sample] | None = None
        if self.team.leads:
            assert self.task is not None and self.env is not None
            limits = limits or Limits(rl.turns, rl.max_response, rl.temperature)
            problems = self.task.batch(rl.seed, step, rl.prompts)
            rollouts = await self.roll(problems, limits, step, row)
            selected = choose(rollouts, rl, step)
            row |= self._describe(rollouts, selected)
            chosen = selected.samples
        chosen = self.team.everyone(chosen)
        began = time.monotonic()
        if chosen:
            row |= self.learner.update(chosen, step)
        row["time/train"] = time.monotonic() - began
        began = time.monotonic()
        await self.sync(step + 1)
        row["time/sync"] = time.monotonic() - began
        row["time/step"] = time.monotonic() - clock
        row["speed/tokens_per_s"] = row.get("train/tokens", 0.0) / max(1e-9, row["time/step"])
        return row

    async def roll(self, problems: Sequence[Problem], limits: Limits, step: int, row: Row) -> list[Trajectory]:
        assert self.engine is not None and self.env is not None and self.codec is not None
        rl = self.settings.rl
        samples = rl.group * (1 if rl.arm == "grpo" else rl.oversample)
        timings, at = Timings(), Place(rl.seed, step)
        if rl.lockstep:
            if not isinstance(self.engine, LocalEngine):
                raise config.ConfigError("rl.lockstep needs one local engine; say rl.lockstep=false for others")
            rollouts = await run_lockstep(
                problems, samples, engine=self.engine, env=self.env, codec=self.codec, limits=limits, at=at, timings=timings
            )
        else:
            rollouts = await run_async(
                problems, samples, engine=self.engine, env=self.env, codec=self.codec, limits=limits, at=at, timings=timings
            )
        row |= {"time/gen": timings.generate_s, "time/tool_wait": timings.tool_s, "time/verify": timings.verify_s}
        return rollouts

    def _describe(self, rollouts: Sequence[Trajectory], selected: Selected) -> Row:
        assert self.env is not None
        latencies, self.env.latencies_ms = self.env.latencies_ms, []
        retries, self.env.infra_retries = self.env.infra_retries, 0
        waited_s = sum(one.tool_wait_s for one in rollouts) / max(1, len(rollouts))
        before, after = metrics.penalties(rollouts), metrics.penalties(selected.kept)
        found = metrics.of_rollouts(rollouts)
        return found | {
            "groups/mixed": selected.mixed,
            "groups/all0": selected.all0,
            "groups/all1": selected.all1,
            "reward/selected": float(np.mean([one.reward for one in selected.kept])) if selected.kept else 0.0,
            "roc/p_err_before": before[0],
            "roc/p_err_after": after[0],
            "roc/p_fmt_before": before[1],
            "roc/p_fmt_after": after[1],
            "service/rps": len(latencies) / max(1e-9, waited_s * max(1.0, found["turns"])),
            "service/p50_ms": float(np.percentile(latencies, 50)) if latencies else 0.0,
            "service/p99_ms": float(np.percentile(latencies, 99)) if latencies else 0.0,
            "service/infra_retries": retries,
            "service/preempted": sum(one.preempted for one in rollouts),
        }

    async def sync(self, version: int) -> None:
        """The engines get the learner's weights. All ranks take part: shards are gathered."""
        weights = self.team.weights(self.learner.model)
        if self.team.leads and self.engine is not None:
            await self.engine.update_weights(weights, version)
