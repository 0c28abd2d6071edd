"""TRL 1.16: `GRPOTrainer(rollout_func=rollout_func(sample), reward_funcs=reward, …)`.

TRL's own `tools=` waits for the tool calls of one completion after the other; a rollout function makes them all at once, and is
the place where 2G rollouts become G. `sample` is yours: an async function (prompt, count, trainer) -> list of `Rollout`, with
`tool` for the calls. The paper's loss in TRL's words is `LOSS`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from grpo_roc import roc
from grpo_roc.integrations import service

LOSS = {
    "loss_type": "dapo",
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "temperature": 1.0,
}


class Rollout(NamedTuple):
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]  # 1: said by the model
    reward: float | None
    outcomes: list[str]
    answers: int
    turns: int


Sample = Callable[[Any, int, Any], Awaitable[list[Rollout]]]


async def tool(code: str, input: str = "") -> str:
    """Execute a Python program and return what it prints.

    Args:
        code: The program.
        input: Its standard input.
    """
    return (await service.run(code, input)).text


def rollout_func(sample: Sample, *, oversample: int = 2, seed: int = 0) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """TRL hands over prompts that are already repeated `num_generations` times; whole groups must be in one process."""

    def roll(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        keep = trainer.num_generations
        if len(prompts) % keep:
            raise ValueError(f"{len(prompts)} prompts are not whole groups of {keep}; see steps_per_generation")
        step = getattr(getattr(trainer, "state", None), "global_step", 0)
        groups = asyncio.run(_sample_all(sample, prompts[::keep], keep * oversample, trainer))
        kept = [one for number, group in enumerate(groups) for one in _keep(group, keep, f"{seed}:{step}:{number}")]
        return {
            "prompt_ids": [one.prompt_ids for one in kept],
            "completion_ids": [one.completion_ids for one in kept],
            "logprobs": [one.logprobs for one in kept],
            "env_mask": [one.env_mask for one in kept],
            "roc_reward": [one.reward for one in kept],
        }

    return roll


async def _sample_all(sample: Sample, prompts: list[Any], count: int, trainer: Any) -> list[list[Rollout]]:
    return list(await asyncio.gather(*(sample(prompt, count, trainer) for prompt in prompts)))


def _keep(group: list[Rollout], keep: int, seed: str) -> list[Rollout]:
    """TRL wants exactly `keep`: what failed on the service's side comes in, without a reward, if there is not enough else."""
    known = [one for one in group if one.reward is not None]
    seen = [roc.Rollout(one.reward or 0.0, one.outcomes, one.answers, one.turns) for one in known]
    kept = [known[index] for index in roc.select(seen, keep, random.Random(seed))]
    return kept + [one for one in group if one.reward is None][: keep - len(kept)]


def reward(completions: list[Any], roc_reward: list[float | None], **kwargs: Any) -> list[float | None]:
    """None tells TRL that there is no reward for this sample."""
    return roc_reward


async def verify_reward(completions: list[Any], ground_truth: list[str], **kwargs: Any) -> list[float | None]:
    """For use without `rollout_func`: answers are verified in the service, all at once."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return list(await asyncio.gather(*(service.verify(text, truth) for text, truth in zip(texts, ground_truth, strict=True))))
