"""Draws a measurement: `python plot.py RESULTS.json PICTURE.png`. Needs matplotlib and nothing of this project."""

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"spawn": "#9a9a9a", "nsjail": "#c9a66b", "zygote": "#4b8bbe", "http": "#1b4f72", "redis": "#7d3c98"}


def main() -> None:
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    results = json.loads(Path(sys.argv[1]).read_text())
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (speed, cpu, idle) = plt.subplots(1, 3, figsize=(12, 3.8), width_ratios=[4, 4, 3], layout="constrained")
    draw_bars(speed, results, "calls_per_s", "calls per second (higher is better)", ratio=True)
    draw_bars(cpu, results, "cpu_ms", "CPU ms per call, everything counted (lower is better)")
    draw_idle(idle, results["idle"])
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(sys.argv[2], dpi=150)


def draw_bars(axes: Any, results: dict[str, Any], figure: str, title: str, ratio: bool = False) -> None:
    figures = [one for one in results["figures"] if one["arm"] in COLOURS]  # single routes are in the table only
    mixes = list(dict.fromkeys(one["mix"] for one in figures))
    arms = list(dict.fromkeys(one["arm"] for one in figures))
    width = 0.8 / max(1, len(arms))
    for one in figures:
        at = mixes.index(one["mix"]) + (arms.index(one["arm"]) - (len(arms) - 1) / 2) * width
        spread = one[figure]
        error = [[spread["median"] - spread["low"]], [spread["high"] - spread["median"]]]
        label = one["arm"] if one["mix"] == mixes[0] else None
        axes.bar(at, spread["median"], width * 0.94, color=COLOURS[one["arm"]], label=label)
        axes.errorbar(at, spread["median"], error, color="black", linewidth=0.8, capsize=2)
        words = f"{one['times_spawn']['median']:.0f} x" if ratio and one["times_spawn"] else f"{spread['median']:.3g}"
        axes.annotate(words, (at, spread["high"]), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(mixes)), mixes)
    axes.set_title(title, fontsize=9)
    axes.margins(y=0.12)


def draw_idle(axes: Any, idle: dict[str, Any] | None) -> None:
    axes.set_title("one idle print(1) through /v1/run, ms", fontsize=9)
    if idle is None:
        axes.set_axis_off()
        return
    values = sorted(idle["latencies_ms"])
    axes.step(values, [(at + 1) / len(values) for at in range(len(values))], where="post", color=COLOURS["http"])
    axes.axhline(0.5, color="#cccccc", linewidth=0.8)
    axes.axvline(15, color="#b03a2e", linewidth=0.8, linestyle="--")
    axes.annotate("p50 at most here", (15, 0.05), (-3, 0), textcoords="offset points", ha="right", fontsize=7, color="#b03a2e")
    axes.set_xlim(0, max(16.0, values[int(0.98 * len(values))] * 1.1))
    axes.set_ylabel("share of calls")


if __name__ == "__main__":
    main()
