"""Evaluation on held-out problems, with the tool and without it."""

from collections.abc import Sequence
from pathlib import Path

from grpo_roc import config, metrics
from grpo_roc.distributed import use_device
from grpo_roc.engines import make_engine
from grpo_roc.env import Position, tool_env
from grpo_roc.model import load_model, load_tokenizer
from grpo_roc.rollout import Actor, Codec, Limits, Trajectory
from grpo_roc.tasks import make_task
from grpo_roc.tasks.base import Problem

EVAL_STEP = 1_000_000  # larger than every training step, so that no random draw is shared
BATCH = 256  # rollouts at a time


async def run_eval(
    settings: config.Config, folder: Path, *, url: str, tools: bool = True, seed: int = 0
) -> tuple[dict[str, float], list[Trajectory]]:
    """Evaluate the model in `folder`, without injected faults."""
    model = load_model(folder, settings.model, use_device(settings))
    engine = make_engine(settings, folder, model.state_dict(), lockstep=settings.engines[0].kind == "local")
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
    rollouts = await sample(actor, problems[: settings.problems], settings.samples, limits, Position(seed, EVAL_STEP))
    return metrics.of_rollouts(rollouts) | first_calls(rollouts) | {"n": float(len(rollouts))}, rollouts


async def sample(actor: Actor, problems: Sequence[Problem], samples: int, limits: Limits, at: Position) -> list[Trajectory]:
    """`samples` rollouts of each problem, in batches."""
    done: list[Trajectory] = []
    width = max(1, BATCH // samples)
    for first in range(0, len(problems), width):
        part = await actor.roll(problems[first : first + width], samples, limits, at._replace(step=at.step + first))
        for one in part:
            one.group += first
        done += part
    return done


def first_calls(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward by the outcome of the first call. Without RoC, a policy that cannot repair errors learns to avoid them."""
    by_first: dict[str, list[float]] = {"ok": [], "error": [], "none": []}
    for one in rollouts:
        if one.reward is not None:
            by_first[one.outcomes[0] if one.outcomes else "none"].append(one.reward)
    return {f"reward/first_{name}": sum(found) / len(found) for name, found in by_first.items() if found}
