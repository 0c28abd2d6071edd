"""Evaluation: mean@k with its standard error for each benchmark, with the tool and without it."""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


class Score(NamedTuple):
    """mean@k: the mean over problems of the mean reward of their rollouts.

    The standard error is that of a mean over problems. It covers the choice of problems and the sampling of rollouts.
    """

    mean: float
    error: float | None  # None with fewer than two problems
    problems: int
    samples: int  # k
    unknown: int  # rollouts without a reward, left out

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.error is None else f"{self.mean:.3f} ± {self.error:.3f}"


class Evaluation(NamedTuple):
    scores: dict[str, Score]  # by benchmark, and `all` if there are several
    metrics: dict[str, float]  # of all rollouts
    rollouts: list[Trajectory]

    def table(self) -> str:
        samples = max(score.samples for score in self.scores.values())
        head = ["benchmark", "problems", f"mean@{samples}", "standard error", "rollouts without a reward"]
        rows = [
            [name, one.problems, one.mean, "-" if one.error is None else one.error, one.unknown]
            for name, one in self.scores.items()
        ]
        return "\n".join(metrics.table(head, rows))

    def as_dict(self) -> dict[str, object]:
        return {"benchmarks": {name: score._asdict() for name, score in self.scores.items()}, "metrics": self.metrics}


async def run_eval(settings: config.Config, folder: Path, *, url: str, tools: bool = True, seed: int = 0) -> Evaluation:
    """Evaluate the model in `folder` on all benchmarks, without injected faults."""
    model = load_model(folder, settings.model, use_device(settings))
    weights = untied(model.state_dict(), model.config)
    engine = make_engine(settings, folder, weights, lockstep=settings.engines[0].kind == "local")
    await engine.update_weights(Weights(weights, 0))
    async with tool_env(settings, url, noise=config.Noise()) as env:
        actor = Actor(engine, env, Codec(load_tokenizer(folder), settings.chat))
        benchmarks = make_task(settings).benchmarks(settings.eval.problems)
        found = await evaluate(actor, benchmarks, settings.eval, seed=seed, tools=tools)
    await engine.aclose()
    return found


async def evaluate(
    actor: Actor, benchmarks: Mapping[str, Sequence[Problem]], settings: config.Eval, *, seed: int, tools: bool = True
) -> Evaluation:
    """All benchmarks in one pool, so that the engines stay busy until the last of them ends. Without injected faults."""
    problems = [problem for one in benchmarks.values() for problem in one]
    if not problems:
        raise config.ConfigError(
            "no problems to evaluate: set task.eval_files, or for validation task.val_file or task.rl_file"
        )
    limits = Limits(settings.turns, settings.max_response, settings.temperature, tools, faults=False)
    rollouts: list[Trajectory] = []
    async for part in sample(actor, problems, settings.samples, limits, Position(seed, EVAL_STEP)):
        rollouts += part
    rollouts.sort(key=lambda one: (one.group, one.sample))
    found = metrics.of_rollouts(rollouts) | first_calls(rollouts) | {"n": float(len(rollouts))}
    return Evaluation(_scores(benchmarks, rollouts), found, rollouts)


def _scores(benchmarks: Mapping[str, Sequence[Problem]], rollouts: Sequence[Trajectory]) -> dict[str, Score]:
    scores, first = {}, 0
    for name, problems in benchmarks.items():
        last = first + len(problems)
        scores[name] = score([one for one in rollouts if first <= one.group < last])
        first = last
    return scores if len(scores) == 1 else scores | {"all": score(rollouts)}


def score(rollouts: Sequence[Trajectory]) -> Score:
    means = [mean for mean in problem_means(rollouts) if mean is not None]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    samples = max((one.sample + 1 for one in rollouts), default=0)
    return Score(metrics.mean(means), error, len(means), samples, sum(one.reward is None for one in rollouts))


def problem_means(rollouts: Sequence[Trajectory]) -> list[float | None]:
    """The mean reward of each problem, in the order of the problems; None where no rollout has a reward."""
    rewards: dict[int, list[float]] = {}
    for one in rollouts:
        rewards.setdefault(one.group, []).extend([] if one.reward is None else [one.reward])
    return [statistics.fmean(found) if found else None for _, found in sorted(rewards.items())]


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
