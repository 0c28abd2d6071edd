"""Plots of metrics as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo_roc import metrics
from grpo_roc.panels import LOGARITHMIC, PANELS

ARMS = {
    "err_in_pos": "tool errors in correct rollouts",
    "len/mean": "tokens",
    "answers>1_in_pos": "double answers",
    "reward/mean": "reward",
}


def of_run(run: Path) -> Path:
    rows = metrics.read(run)
    if not rows:
        raise FileNotFoundError(f"{run}: metrics.jsonl is missing or empty")
    figure, axes = plt.subplots(2, 4, figsize=(17, 6.5))
    for axis, (title, lines) in zip(axes.flat, PANELS.items(), strict=True):
        for name, label in lines.items():
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                marker = "o" if name.startswith("eval") else None
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3)
        axis.set_title(title)
        axis.set_xlabel("step")
        if axis.get_lines():
            axis.legend(fontsize=8)
        if title in LOGARITHMIC:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    return _save(figure, run / "metrics.png")


def of_arms(runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path) -> Path:
    """One line per arm, the mean over its seeds; a pale line per seed."""
    figure, axes = plt.subplots(1, len(ARMS), figsize=(4 * len(ARMS), 3.6))
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axis, (name, title) in zip(axes, ARMS.items(), strict=True):
        for (arm, seeds), colour in zip(runs.items(), colours, strict=False):
            curves = [_smooth([row[name] for row in rows]) for rows in seeds]
            for curve in curves:
                axis.plot(curve, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot([sum(values) / len(values) for values in zip(*curves, strict=False)], color=colour, label=arm)
        axis.set_title(title)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    axes[0].legend()
    return _save(figure, path)


def of_ablation(runs: Mapping[str, Mapping[str, Mapping[int, Sequence[Any]]]], shown: Mapping[str, str], path: Path) -> Path:
    """A row per level of noise, a column per metric: the mean over seeds at each validation, over tokens learned from."""
    figure, axes = plt.subplots(len(runs), len(shown), figsize=(4 * len(shown), 3 * len(runs)), squeeze=False, sharex=True)
    for row, (noise, arms) in zip(axes, runs.items(), strict=True):
        for axis, (name, title) in zip(row, shown.items(), strict=True):
            for arm, by_seed in arms.items():
                validations = list(zip(*by_seed.values(), strict=True))
                tokens = [sum(point.tokens for point in points) / len(points) / 1000 for points in validations]
                axis.plot(
                    tokens, [sum(p.row[name] for p in points) / len(points) for points in validations], label=arm, marker="."
                )
            axis.set_title(f"{title}, noise {noise}", fontsize=9)
            axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("thousand tokens learned from")
    axes[0][0].legend(fontsize=8)
    return _save(figure, path)


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    return [sum(part) / len(part) for part in (values[max(0, i - width + 1) : i + 1] for i in range(len(values)))]


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
