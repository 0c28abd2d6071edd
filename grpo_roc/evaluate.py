"""Evaluation on held-out problems, with the tool and without it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from grpo_roc import config, metrics
from grpo_roc.checkpoint import untied
from grpo_roc.distributed import use_device
from grpo_roc.engines import make_engine
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.weights import Weights
from grpo_roc.env import Position, tool_env
from grpo_roc.model import load_model, load_tokenizer
from grpo_roc.rollout import Actor, Codec, Limits, Trajectory
from grpo_roc.tasks import make_task
from grpo_roc.tasks.base import Problem

EVAL_STEP = 1_000_000  # larger than every training step, so that no random draw is shared
BATCH = 256  # rollouts at a time in lockstep
IN_PROGRESS = 2048  # rollouts else; the scheduler lets as many of them generate as fit


async def run_eval(
    settings: config.Config, folder: Path, *, url: str, tools: bool = True, seed: int = 0
) -> tuple[dict[str, float], list[Trajectory]]:
    """Evaluate the model in `folder`, without injected faults."""
    model = load_model(folder, settings.model, use_device(settings))
    weights = untied(model.state_dict(), model.config)
    engine = make_engine(settings, folder, weights, lockstep=settings.engines[0].kind == "local")
    await engine.update_weights(Weights(weights, 0))
    async with tool_env(settings, url, noise=config.Noise()) as env:
        actor = Actor(engine, env, Codec(load_tokenizer(folder), settings.chat))
        problems = make_task(settings).heldout(settings.eval.problems)
        found = await evaluate(actor, problems, settings.eval, seed=seed, tools=tools)
    await engine.aclose()
    return found


async def evaluate(
    actor: Actor, problems: Sequence[Problem], settings: config.Eval, *, seed: int, tools: bool = True
) -> tuple[dict[str, float], list[Trajectory]]:
    limits = Limits(settings.turns, settings.max_response, settings.temperature, tools)
    rollouts: list[Trajectory] = []
    async for part in sample(actor, problems[: settings.problems], settings.samples, limits, Position(seed, EVAL_STEP)):
        rollouts += part
    rollouts.sort(key=lambda one: (one.group, one.sample))
    return metrics.of_rollouts(rollouts) | first_calls(rollouts) | {"n": float(len(rollouts))}, rollouts


async def sample(
    actor: Actor, problems: Sequence[Problem], samples: int, limits: Limits, at: Position
) -> AsyncIterator[list[Trajectory]]:
    """`samples` rollouts of each problem, in the order in which problems are finished; `group` is the problem's number.

    A local engine runs batches in lockstep. Others always have `IN_PROGRESS` rollouts in progress: none waits for a slow one.
    """
    lockstep = isinstance(actor.engine, LocalEngine)
    width, most = (max(1, BATCH // samples), 1) if lockstep else (1, max(1, IN_PROGRESS // samples))
    running: set[asyncio.Task[list[Trajectory]]] = set()
    try:
        for first in range(0, len(problems), width):
            part = problems[first : first + width]
            running.add(asyncio.create_task(actor.roll(part, samples, limits, at._replace(group=first))))
            while len(running) >= most or (running and first + width >= len(problems)):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
    finally:
        for task in running:
            task.cancel()


def first_calls(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward by the outcome of the first call. Without RoC, a policy that cannot repair errors learns to avoid them."""
    by_first: dict[str, list[float]] = {"ok": [], "error": [], "none": []}
    for one in rollouts:
        if one.reward is not None:
            by_first[one.outcomes[0] if one.outcomes else "none"].append(one.reward)
    return {f"reward/first_{name}": sum(found) / len(found) for name, found in by_first.items() if found}
