"""Resampling on correct (RoC): which rollouts of a prompt to learn from, after arXiv 2508.20722, section 2.

Of 2G rollouts G are kept: wrong ones at random, to keep all kinds of failure, and correct ones with a higher probability, the
fewer tool errors and format errors they have. Calls that the service failed do not count.

This module needs only the standard library: adapters for other trainers import it. `keep_indices` selects from counts, `select`
from rollouts; `group_advantages` selects and normalises for trainers that cannot drop rollouts.
"""

import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

Mode = Literal["inverse", "topk", "uniform"]


class Rollout(NamedTuple):
    """The input of the selection, taken from structured results, never from texts."""

    reward: float
    outcomes: Sequence[str]  # of its tool calls: "ok", "error" (the model is to blame), "infra"
    answers: int
    turns: int  # of the assistant


def tool_error_share(outcomes: Sequence[str], without_calls: float = 0.5) -> float:
    """p_err: the share of calls that failed by the model's fault."""
    counted = [outcome for outcome in outcomes if outcome != "infra"]
    return sum(outcome == "error" for outcome in counted) / len(counted) if counted else without_calls


def format_penalty(answers: int, turns: int) -> float:
    """p_format: 1 without an answer, else the number of extra answers per turn."""
    return min(1.0, (answers - 1) / max(1, turns)) if answers else 1.0


def penalty(rollout: Rollout) -> float:
    return tool_error_share(rollout.outcomes) + format_penalty(rollout.answers, rollout.turns)


def penalty_of_counts(errors: int, calls: int, answers: int, turns: int) -> float:
    """The same from counts; `calls` without those that the service failed."""
    return tool_error_share(["error"] * errors + ["ok"] * (calls - errors)) + format_penalty(answers, turns)


def all_equal(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) <= 1


class Counts(NamedTuple):
    negative: int
    positive: int


def counts(negative: int, positive: int, keep: int, min_neg: int = 2, min_pos: int = 2) -> Counts:
    """How many of each kind are kept: in proportion, but at least the minimum of each if there are so many."""
    total = negative + positive
    if keep >= total:
        return Counts(negative, positive)
    neg = negative * keep // total
    neg = max(neg, min(min_neg, negative), keep - positive)
    pos = keep - neg
    pos = max(pos, min(min_pos, positive), keep - negative)
    return Counts(keep - pos, pos)


def select(
    rollouts: Sequence[Rollout],
    keep: int,
    rng: random.Random,
    *,
    mode: Mode = "inverse",
    eps: float = 0.05,
    min_neg: int = 2,
    min_pos: int = 2,
) -> list[int]:
    """Indexes of the kept rollouts, ascending."""
    rewards, penalties = [one.reward for one in rollouts], [penalty(one) for one in rollouts]
    return select_by_penalty(rewards, penalties, keep, rng, mode=mode, eps=eps, min_neg=min_neg, min_pos=min_pos)


def select_by_penalty(
    rewards: Sequence[float],
    penalties: Sequence[float],
    keep: int,
    rng: random.Random,
    *,
    mode: Mode = "inverse",
    eps: float = 0.05,
    min_neg: int = 2,
    min_pos: int = 2,
) -> list[int]:
    negative = [index for index, reward in enumerate(rewards) if reward <= 0]
    positive = [index for index, reward in enumerate(rewards) if reward > 0]
    wanted = counts(len(negative), len(positive), keep, min_neg, min_pos)
    kept = rng.sample(negative, wanted.negative)
    return sorted(kept + _pick({index: penalties[index] for index in positive}, wanted.positive, rng, mode, eps))


def keep_indices(
    rewards: Sequence[float],
    errors: Sequence[int],
    calls: Sequence[int],
    answers: Sequence[int],
    turns: Sequence[int],
    *,
    keep: int,
    seed: object,
    mode: Mode = "inverse",
) -> list[int]:
    """The selection for trainers that hold one list per count, with one entry per rollout of the group."""
    penalties = [penalty_of_counts(*counted) for counted in zip(errors, calls, answers, turns, strict=True)]
    return select_by_penalty(rewards, penalties, keep, random.Random(str(seed)), mode=mode)


def group_advantages(
    rewards: Sequence[float | None], penalties: Sequence[float], keep: int, seed: object, *, mode: Mode = "inverse"
) -> list[float]:
    """One advantage per rollout: zero for those not selected, without a known reward, and in a group of equal rewards."""
    known = [(index, reward) for index, reward in enumerate(rewards) if reward is not None]
    found = [reward for _, reward in known]
    gains = [0.0] * len(rewards)
    if all_equal(found):
        return gains
    kept = select_by_penalty(found, [penalties[index] for index, _ in known], keep, random.Random(str(seed)), mode=mode)
    for index, gain in zip(kept, advantages([found[index] for index in kept]), strict=True):
        gains[known[index][0]] = gain
    return gains


def _pick(penalties: dict[int, float], count: int, rng: random.Random, mode: Mode, eps: float) -> list[int]:
    if mode == "uniform":
        return rng.sample(list(penalties), count)
    order = list(penalties)
    rng.shuffle(order)  # ties are broken at random
    if mode == "topk":
        return sorted(order, key=penalties.__getitem__)[:count]
    # Weighted sampling without replacement: the largest log(u) / weight (Efraimidis and Spirakis 2006).
    keys = {index: math.log(1 - rng.random()) * (penalties[index] + eps) for index in order}
    return sorted(order, key=keys.__getitem__, reverse=True)[:count]


def advantages(rewards: Sequence[float], *, std: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6) over the kept rollouts, with the unbiased std."""
    mean = sum(rewards) / len(rewards)
    if not std:
        return [reward - mean for reward in rewards]
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-6) for reward in rewards]
