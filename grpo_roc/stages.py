"""Three stages: short answers, longer ones, then only what is still hard. Each ends by its trigger or at its cap.

plateau    the truncated share has settled and the reward has stopped rising
solved     most prompts teach nothing any more, because every rollout is right
eval_drop  held-out reward has fallen from its best; the best checkpoint is kept
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_roc import config
from grpo_roc.rollout import Trajectory
from grpo_roc.tasks.base import Problem

WINDOW = 10


class Ended(NamedTuple):
    by: str  # "cap" or the trigger's name
    why: str


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through them, per step."""
    n = len(values)
    mid, mean = (n - 1) / 2, sum(values) / n
    square = sum((x - mid) ** 2 for x in range(n))
    return sum((x - mid) * (y - mean) for x, y in enumerate(values)) / square if square else 0.0


def smoothed(values: Sequence[float], share: float = 0.2) -> float:
    found = values[0]
    for value in values[1:]:
        found += share * (value - found)
    return found


def ended(stage: config.Stage, rows: Sequence[dict[str, Any]]) -> Ended | None:
    """`rows`: the stage's own, so far. None: it goes on."""
    if len(rows) >= max(stage.min_steps, WINDOW) and (found := _TRIGGERS[stage.end](stage, rows)):
        return Ended(stage.end, found)
    if len(rows) >= stage.steps:
        return Ended("cap", f"{stage.steps} steps are done")
    return None


def _plateau(stage: config.Stage, rows: Sequence[dict[str, Any]]) -> str:
    clip = smoothed([row["clip_ratio"] for row in rows])
    rise = slope([row["reward/mean"] for row in rows[-WINDOW:]])
    low, high = stage.clip_ratio
    if low <= clip <= high and rise < stage.reward_slope:
        return f"truncated share {clip:.3f} within {low}-{high} and reward slope {rise:+.4f} < {stage.reward_slope}"
    return ""


def _solved(stage: config.Stage, rows: Sequence[dict[str, Any]]) -> str:
    last = rows[-5:]
    groups = sum(row["groups/mixed"] + row["groups/all0"] + row["groups/all1"] for row in last)
    share = sum(row["groups/all1"] for row in last) / groups
    return (
        f"{share:.2f} of the prompts had only correct rollouts (> {stage.solved_share})" if share > stage.solved_share else ""
    )


def _eval_drop(stage: config.Stage, rows: Sequence[dict[str, Any]]) -> str:
    found = [row["eval/reward"] for row in rows if "eval/reward" in row]
    if len(found) > 1 and found[-1] < max(found) - stage.eval_drop:
        return f"held-out reward fell from {max(found):.3f} to {found[-1]:.3f}"
    return ""


_TRIGGERS = {"cap": lambda stage, rows: "", "plateau": _plateau, "solved": _solved, "eval_drop": _eval_drop}


def still_hard(problems: Sequence[Problem], rollouts: Sequence[Trajectory]) -> list[Problem]:
    """Those that were not solved in every one of their rollouts. `group` is the problem's position."""
    failed = {one.group for one in rollouts if one.reward is not None and not one.correct}
    return [problem for number, problem in enumerate(problems) if number in failed]


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line per stage, as a Markdown table."""
    head = (
        "| stage | problems | max response | turns | steps | mean tokens | held-out reward | ended by |\n"
        + "| --- " * 8
        + "|\n"
    )
    return head + "".join(
        f"| {row['stage']} | {row['problems']} | {row['max_response']} | {row['turns']} | {row['steps']} | "
        f"{row['tokens_first']:.1f} → {row['tokens_last']:.1f} | {row['reward_first']:.3f} → {row['reward_last']:.3f} | "
        f"{row['by']}: {row['why']} |\n"
        for row in found
    )
