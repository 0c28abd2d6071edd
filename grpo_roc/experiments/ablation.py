"""Which part of RoC does what? Five ways to use 2G rollouts, at three levels of environment noise, with confidence intervals.

roc        G kept: wrong ones at random, correct ones by weighted draw
topk       G kept: the correct ones with the lowest penalty (the release)
uniform    G kept at random
keep_all   all 2G kept
penalty    all 2G kept, and the share of tool errors is subtracted from the reward

Every arm makes the same number of rollouts at every step. Arms that keep all learn from twice as many, so they are also
compared where each has learned from the same number of tokens. All numbers come from validations without injected faults; the
differences are paired by seed.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_roc import config, metrics
from grpo_roc.experiments import plots
from grpo_roc.experiments.common import sft_model, with_service
from grpo_roc.experiments.statistics import Interval, interval
from grpo_roc.runs import run_rl

PENALTY = 0.5
ARMS: dict[str, dict[str, Any]] = {
    "roc": {"arm": "roc", "roc": "inverse"},
    "topk": {"arm": "roc", "roc": "topk"},
    "uniform": {"arm": "uniform"},
    "keep_all": {"arm": "grpo"},
    "penalty": {"arm": "grpo", "error_penalty": PENALTY},
}
NOISE = {"none": (0.0, 0.0), "low": (0.05, 0.05), "high": (0.15, 0.15)}  # share of failed calls, share of corrupted results
SHOWN = {
    "eval/reward": "reward",
    "eval/err_in_pos": "tool errors in correct rollouts",
    "eval/len/mean": "tokens",
    "eval/answers>1": "double answers",
}
LEVEL = 0.95
BUDGETS = ("rollouts", "tokens")


class Point(NamedTuple):
    """A validation of a run."""

    step: int
    tokens: float  # learned from until then
    row: Mapping[str, float]


Runs = dict[str, dict[str, dict[int, list[Point]]]]  # noise, arm, seed


async def run(settings: config.Config, out: Path, model: Path | None, seeds: Sequence[int], page: Path | None = None) -> str:
    """Finished runs are not repeated and interrupted ones resume. The page is written again after every run."""
    out.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    with with_service(settings) as settings:
        start = model or sft_model(settings, out)
        for seed in seeds:
            for noise in NOISE:
                for arm in ARMS:
                    began, folder = time.monotonic(), out / f"{noise}-{arm}-{seed}"
                    if not (folder / "model").exists():
                        await run_rl(arm_settings(settings, arm, noise, seed), start, folder)
                        _add_seconds(out, time.monotonic() - began)
            text = write_page(settings, out, page or out / "ablation.md")
    return text


def arm_settings(settings: config.Config, arm: str, noise: str, seed: int) -> config.Config:
    rl = settings.rl
    changes = ARMS[arm] | {"seed": seed, "eval_every": rl.eval_every or max(1, rl.steps // 7)}
    if ARMS[arm]["arm"] == "grpo":
        changes |= {"group": rl.group * rl.oversample, "oversample": 1}
    fault, corrupt = NOISE[noise]
    return msgspec.structs.replace(
        config.with_rl(settings, **changes), noise=config.Noise(fault_rate=fault, corrupt_rate=corrupt)
    )


def _add_seconds(out: Path, seconds: float) -> None:
    path = out / "seconds.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else 0.0) + seconds))


def write_page(settings: config.Config, out: Path, page: Path) -> str:
    """The page and its plot, of the seeds whose runs are all done."""
    runs, seeds = read(out)
    seconds = json.loads((out / "seconds.json").read_text())
    text = report(settings, runs, seeds, seconds, page.stem)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    plots.of_ablation(runs, SHOWN, page.with_suffix(".png"))
    return text


def read(out: Path) -> tuple[Runs, list[int]]:
    runs: Runs = {noise: {arm: {} for arm in ARMS} for noise in NOISE}
    for folder in sorted(out.glob("*-*-*")):
        noise, arm, seed = folder.name.split("-")
        if (folder / "model").exists():
            runs[noise][arm][int(seed)] = points(metrics.read(folder))
    every = [{*by_seed} for arms in runs.values() for by_seed in arms.values()]
    seeds = sorted(set.intersection(*every))
    return {noise: {arm: {seed: arms[arm][seed] for seed in seeds} for arm in ARMS} for noise, arms in runs.items()}, seeds


def points(rows: Sequence[Mapping[str, float]]) -> list[Point]:
    found, tokens = [], 0.0
    for row in rows:
        tokens += row.get("train/tokens", 0.0)
        if "eval/reward" in row:
            found.append(Point(int(row["step"]) + 1, tokens, row))
    return found


def at_tokens(run: Sequence[Point], tokens: float, name: str) -> float:
    """The metric where the run has learned from so many tokens, between two validations by a straight line."""
    for before, after in pairwise(run):
        if before.tokens <= tokens <= after.tokens:
            share = (tokens - before.tokens) / max(1.0, after.tokens - before.tokens)
            return before.row[name] + share * (after.row[name] - before.row[name])
    return run[0].row[name] if tokens < run[0].tokens else run[-1].row[name]


def value(runs: Runs, noise: str, arm: str, seed: int, name: str, budget: str) -> float:
    """At equal rollouts: at the end. At equal tokens: where the arm that learned from the fewest ends, with this seed."""
    run = runs[noise][arm][seed]
    least = min(other[seed][-1].tokens for other in runs[noise].values())
    return run[-1].row[name] if budget == "rollouts" else at_tokens(run, least, name)


def difference(runs: Runs, seeds: Sequence[int], noise: str, arm: str, name: str, budget: str, level: float) -> Interval:
    """Of RoC and another arm, paired by seed."""
    pairs = (tuple(value(runs, noise, one, seed, name, budget) for one in ("roc", arm)) for seed in seeds)
    return interval([roc - other for roc, other in pairs], level)


def corrected_level() -> float:
    """Of each interval, so that all intervals of a metric and a budget hold at once with probability `LEVEL` (Bonferroni)."""
    return 1 - (1 - LEVEL) / (len(NOISE) * (len(ARMS) - 1))


def report(settings: config.Config, runs: Runs, seeds: Sequence[int], seconds: float, plot: str) -> str:
    rl = settings.rl
    lines = [
        "# What each part of RoC does, on the toy",
        "",
        f"{len(seeds)} seeds ({', '.join(map(str, seeds))}), {rl.steps} updates of {rl.prompts} prompts with "
        f"{rl.group * rl.oversample} rollouts each; G={rl.group}, lr {rl.lr}. Penalty: {PENALTY} times the share of tool "
        f"errors. {seconds / 3600:.1f} h for all runs. Noise (share of failed calls, of wrong results): {_noise()}. "
        f"Validation: {settings.task.val_problems} problems without injected faults.",
        "",
        "```sh not-run=hours",
        f"python -m grpo_roc ablation --seeds {' '.join(map(str, seeds))}",
        "```",
        "",
        f"![{', '.join(SHOWN.values())}]({plot}.png)",
        "",
    ]
    for budget in BUDGETS:
        lines += [f"## At equal {budget}", "", *_means(runs, seeds, budget), "", *_differences(runs, seeds, budget), ""]
    return "\n".join([*lines, "## What holds", "", *statements(runs, seeds), ""])


def _noise() -> str:
    return "; ".join(f"{name} {fault}, {corrupt}" for name, (fault, corrupt) in NOISE.items())


def _means(runs: Runs, seeds: Sequence[int], budget: str) -> list[str]:
    rows = [
        [noise, arm, *(metrics.mean([value(runs, noise, arm, seed, name, budget) for seed in seeds]) for name in SHOWN)]
        for noise in NOISE
        for arm in ARMS
    ]
    return metrics.table(["noise", "arm, mean of seeds", *SHOWN.values()], rows, 2)


def _differences(runs: Runs, seeds: Sequence[int], budget: str) -> list[str]:
    rows = [
        [noise, arm, *(str(difference(runs, seeds, noise, arm, name, budget, LEVEL)) for name in SHOWN)]
        for noise in NOISE
        for arm in ARMS
        if arm != "roc"
    ]
    return metrics.table(["noise", f"roc minus …, {LEVEL:.0%} interval", *SHOWN.values()], rows, 2)


def statements(runs: Runs, seeds: Sequence[int]) -> list[str]:
    """One line per metric and budget: the differences whose corrected interval excludes zero, or that there is none."""
    found = [
        f"These intervals are corrected for the {len(NOISE) * (len(ARMS) - 1)} comparisons of each line: all of them hold at "
        f"once with {LEVEL:.0%} confidence.",
        "",
    ]
    for budget in BUDGETS:
        for name, title in SHOWN.items():
            every = [
                (noise, arm, difference(runs, seeds, noise, arm, name, budget, corrected_level()))
                for noise in NOISE
                for arm in ARMS
                if arm != "roc"
            ]
            clear = [f"{one} against {arm}, noise {noise}" for noise, arm, one in every if one.excludes_zero]
            what = "; ".join(clear) if clear else "no difference between RoC and another arm is resolved"
            found.append(f"- {title}, equal {budget}: {what}.")
    return found
