"""One step of GRPO-RoC: problems, rollouts, selection, one update, new weights for the engine. Read `train_step` first.

A step depends on (settings, seed, step, weights, optimizer) alone, and with overlap on the rollouts that the step before began.
In lockstep mode this holds to the last bit, so a run that was killed and resumed writes the same rows as one that was not.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from grpo_roc import config, metrics, roc
from grpo_roc.batches import Sample
from grpo_roc.engines.weights import Weights
from grpo_roc.env import ToolEnv
from grpo_roc.learner import Learner
from grpo_roc.overlap import Rollouts
from grpo_roc.recorder import Kept, Recorder
from grpo_roc.rollout import Actor, Limits, Trajectory
from grpo_roc.tasks.base import Task

Row = dict[str, Any]


async def train_step(
    step: int,
    rl: config.Rl,
    task: Task,
    learner: Learner,
    source: Rollouts | None,
    limits: Limits | None = None,
    *,
    last: bool = False,
    recorder: Recorder | None = None,
) -> Row:
    """Rank 0 has a source of rollouts and a recorder of them; all ranks learn from them. Returns the step's metrics.

    With `overlap`, the rollouts of the next step begin before the update, unless this step is the `last` one.
    """
    began, row = time.monotonic(), Row(step=step)
    limits = limits or Limits(rl.turns, rl.max_response, rl.temperature)
    samples: list[Sample] | None = None
    busy = source.busy.read() if source else 0.0
    if source is not None:
        rolled = await source.take(step, task, limits)
        selected = select(rolled.rollouts, rl, step)
        row |= rolled.times | _describe(step, rolled.rollouts, selected, source.actor.env)
        samples = selected.samples
    samples = learner.ranks.broadcast(samples)

    actor, overlap = source.actor if source else None, rl.overlap == "one_step_off"
    if actor is not None and not overlap:
        await actor.engine.sleep()
    sync_s = await push_weights(learner, actor, step) if overlap else 0.0
    learner.ranks.barrier()  # the other ranks wait for rank 0 here: a collective of the update would time out
    if overlap and source is not None and not last:
        source.begin(step + 1, task, limits)
    train_began = time.monotonic()
    if samples:
        row |= await _update_in_thread(learner, samples, step) if overlap and source else learner.update(samples, step)
    train_s = time.monotonic() - train_began
    entropies = learner.take_entropies()
    if source is not None and recorder is not None:
        facts = [Kept(*pair) for pair in zip(selected.samples, entropies, strict=True)]
        kept = list(zip(selected.kept, facts, strict=True))
        await asyncio.to_thread(recorder.write, step, rolled.rollouts, kept)
    sync_s += 0.0 if overlap else await push_weights(learner, actor, step + 1)
    step_s = time.monotonic() - began
    row |= {"time/train": train_s, "time/sync": sync_s, "time/step": step_s}
    row["speed/tokens_per_s"] = row.get("train/tokens", 0.0) / max(1e-9, step_s)
    if source is not None:
        row["time/trainer_idle_share"] = 1 - train_s / max(1e-9, step_s)
        row["time/engine_idle_share"] = 1 - (source.busy.read() - busy) / max(1e-9, step_s)
    return row


async def push_weights(learner: Learner, actor: Actor | None, version: int) -> float:
    """Give the engines the learner's weights; returns the seconds. Collective: every rank must call it."""
    began = time.monotonic()
    weights = learner.ranks.gather_weights(learner.model)
    torch.cuda.empty_cache()  # on every rank, before a colocated engine wakes
    if actor is not None:
        await actor.engine.update_weights(Weights(weights, version))
    return time.monotonic() - began


async def _update_in_thread(learner: Learner, samples: Sequence[Sample], step: int) -> Row:
    """The event loop stays free for rollouts."""
    threads, device = torch.get_num_threads(), learner.ranks.device

    def update() -> Row:
        torch.set_num_threads(threads)  # both are settings of a thread
        if device.kind == "cuda":
            torch.cuda.set_device(device.torch)
        return learner.update(samples, step)

    return await asyncio.to_thread(update)


class Selected(NamedTuple):
    samples: list[Sample]
    kept: list[Trajectory]
    all0: int
    all1: int
    mixed: int


def select(rollouts: Sequence[Trajectory], settings: config.Rl, step: int) -> Selected:
    """Reject groups with equal rewards, keep G rollouts of every other group, and compute their advantages."""
    groups: dict[int, list[Trajectory]] = {}
    for one in rollouts:
        groups.setdefault(one.group, [])
        if one.reward is not None:
            groups[one.group].append(one)
    samples: list[Sample] = []
    kept: list[Trajectory] = []
    equal = {0.0: 0, 1.0: 0}
    for number, group in groups.items():
        rewards = [_gain(one, settings) for one in group]
        if roc.all_equal(rewards):
            equal[float(bool(rewards) and rewards[0] > 0)] += 1
            continue
        chosen = [group[index] for index in _keep(group, settings, random.Random(f"{settings.seed}:{step}:{number}"))]
        kept += chosen
        advantages = roc.advantages([_gain(one, settings) for one in chosen], std=settings.std_advantage)
        samples += [_sample(one, advantage) for one, advantage in zip(chosen, advantages, strict=True)]
    return Selected(samples, kept, equal[0.0], equal[1.0], len(groups) - equal[0.0] - equal[1.0])


def _gain(one: Trajectory, rl: config.Rl) -> float:
    """The reward, less the penalty of an arm that puts tool errors into the reward instead of the selection."""
    return (one.reward or 0.0) - rl.error_penalty * roc.tool_error_share(one.outcomes, without_calls=0.0)


def _keep(group: Sequence[Trajectory], rl: config.Rl, rng: random.Random) -> list[int]:
    if rl.arm == "grpo":
        return list(range(len(group)))
    seen = [roc.Rollout(one.reward or 0.0, one.outcomes, one.answers, one.turns) for one in group]
    mode: roc.Mode = "uniform" if rl.arm == "uniform" else rl.roc
    return roc.select(seen, rl.group, rng, mode=mode, eps=rl.eps, min_neg=rl.min_neg, min_pos=rl.min_pos)


def _sample(one: Trajectory, advantage: float) -> Sample:
    length = len(one.prompt)
    return Sample(one.prompt + one.ids, [0] * length + one.mask, [0.0] * length + one.logprobs, advantage, one.group)


def _describe(step: int, rollouts: Sequence[Trajectory], selected: Selected, env: ToolEnv) -> Row:
    latencies, env.latencies_ms = env.latencies_ms, []
    retries, env.infra_retries = env.infra_retries, 0
    wait_s = sum(one.tool_wait_s for one in rollouts) / max(1, len(rollouts))
    before, after = metrics.penalties(rollouts), metrics.penalties(selected.kept)
    row = metrics.of_rollouts(rollouts)
    p50, p99 = np.percentile(latencies, [50, 99]) if latencies else (0.0, 0.0)
    return row | {
        "rollout/age": statistics.fmean(step - one.weight_version for one in rollouts),
        "groups/mixed": selected.mixed,
        "groups/all0": selected.all0,
        "groups/all1": selected.all1,
        "reward/selected": statistics.fmean(one.reward or 0.0 for one in selected.kept) if selected.kept else 0.0,
        "roc/p_err_before": before[0],
        "roc/p_err_after": after[0],
        "roc/p_fmt_before": before[1],
        "roc/p_fmt_after": after[1],
        "service/rps": len(latencies) / max(1e-9, wait_s * max(1.0, row["turns"])),
        "service/p50_ms": float(p50),
        "service/p99_ms": float(p99),
        "service/infra_retries": retries,
        "service/preempted": sum(one.preempted for one in rollouts),
    }
