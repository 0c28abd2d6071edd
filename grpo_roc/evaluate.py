"""Held-out problems: reward and habits of a policy, with the tool and without it."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_roc import config, metrics
from grpo_roc.engines.base import Engine
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import Place, ToolEnv
from grpo_roc.rollout import Codec, Limits, Trajectory, run_async, run_lockstep
from grpo_roc.tasks.base import Problem

EVAL_STEP = 1_000_000  # far from every training step: other luck
TOGETHER = 256  # rollouts at a time


async def sample(
    problems: Sequence[Problem],
    samples: int,
    *,
    engine: Engine,
    env: ToolEnv,
    codec: Codec,
    limits: Limits,
    seed: int,
    step: int = EVAL_STEP,
) -> list[Trajectory]:
    done: list[Trajectory] = []
    width = max(1, TOGETHER // samples)
    for first in range(0, len(problems), width):
        part, at = problems[first : first + width], Place(seed, step + first)
        if isinstance(engine, LocalEngine):
            rollouts = await run_lockstep(part, samples, engine=engine, env=env, codec=codec, limits=limits, at=at)
        else:
            rollouts = await run_async(part, samples, engine=engine, env=env, codec=codec, limits=limits, at=at)
        for one in rollouts:
            one.group += first
        done += rollouts
    return done


async def evaluate(
    problems: Sequence[Problem],
    settings: config.Eval,
    *,
    engine: Engine,
    env: ToolEnv,
    codec: Codec,
    seed: int,
    tools: bool = True,
) -> tuple[dict[str, float], list[Trajectory]]:
    limits = Limits(settings.turns, settings.max_response, settings.temperature, tools)
    rollouts = await sample(
        problems[: settings.problems], settings.samples, engine=engine, env=env, codec=codec, limits=limits, seed=seed
    )
    return metrics.of_rollouts(rollouts) | first_calls(rollouts) | {"n": float(len(rollouts))}, rollouts


def first_calls(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Reward by what the first call came to: a policy that cannot recover from an error unlearns errors without RoC."""
    by_first: dict[str, list[float]] = {"ok": [], "error": [], "none": []}
    for one in rollouts:
        if one.reward is not None:
            by_first[one.outcomes[0] if one.outcomes else "none"].append(one.reward)
    return {f"reward/first_{name}": sum(found) / len(found) for name, found in by_first.items() if found}
