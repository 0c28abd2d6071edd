"""Draws the report: `python performance_plot.py FOLDER`, pictures of its JSON files. Needs matplotlib, nothing of ours."""

import json
import sys
from pathlib import Path
from typing import Any

BLUE, LIGHT, BROWN, SAND, GREY, RED = "#1b4f72", "#4b8bbe", "#c0763a", "#e0a96d", "#9a9a9a", "#b03a2e"
ARMS = {"spawn": GREY, "nsjail": "#c9a66b", "zygote": LIGHT, "http": BLUE, "redis": "#7d3c98"}
RUNS = {("http", False): BLUE, ("grpc", False): LIGHT, ("http", True): BROWN, ("grpc", True): SAND}


def main() -> None:
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    folder = Path(sys.argv[1])
    pictures = {
        "speed": ("speed", draw_speed),
        "calibration": ("calibration", draw_latency),
        "memory": ("bursts", draw_memory),
        "fairness": ("bursts", draw_fairness),
        "scaling": ("scaling", draw_scaling),
        "recovery": ("recovery", draw_recovery),
    }
    for name, (source, draw) in pictures.items():
        save(plt, folder / f"{source}.json", folder / f"{name}.png", draw)
    save(plt, folder.parent / "soak.json", folder.parent / "soak.png", draw_soak)


def save(plt: Any, source: Path, picture: Path, draw: Any) -> None:
    if source.exists():
        figure = draw(plt, json.loads(source.read_text()))
        figure.savefig(picture, dpi=130)
        plt.close(figure)


def draw_speed(plt: Any, found: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    cores = int(found["machine"]["cores"])
    figures = [one for one in found["figures"] if one["arm"] in ARMS]
    mixes = list(dict.fromkeys(one["mix"] for one in figures))
    arms = list(dict.fromkeys(one["arm"] for one in figures))
    width = 0.8 / max(1, len(arms))
    for one in figures:
        at = mixes.index(one["mix"]) + (arms.index(one["arm"]) - (len(arms) - 1) / 2) * width
        middle, low, high = (one["calls_per_s"][name] / cores for name in ("median", "low", "high"))
        label = one["arm"] if one["mix"] == mixes[0] else None
        axes.bar(at, middle, width * 0.94, color=ARMS[one["arm"]], label=label)
        axes.errorbar(at, middle, [[middle - low], [high - middle]], color="black", linewidth=0.8, capsize=2)
        axes.annotate(f"{middle:.3g}", (at, high), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_yscale("log")
    axes.set_xticks(range(len(mixes)), mixes)
    axes.set_title("calls per second and core", fontsize=9)
    axes.legend(frameon=False, ncols=5, fontsize=8)
    axes.margins(y=0.2)
    return figure


def draw_latency(plt: Any, found: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    points = found["validation"]
    loads = [100 * one["load"] for one in points]
    for name, colour in (("mean", BLUE), ("p50", LIGHT), ("p99", BROWN)):
        axes.plot(loads, [one[f"measured_{name}_ms"] for one in points], "o-", color=colour, label=f"{name}, measured")
        axes.plot(loads, [one[f"predicted_{name}_ms"] for one in points], "x--", color=colour, label=f"{name}, predicted")
    for one, load in zip(points, loads, strict=True):
        axes.plot([load, load], [min(one["means_ms"]), max(one["means_ms"])], color=BLUE, linewidth=3, alpha=0.4)
    axes.set_yscale("log")
    axes.set_xlabel(f"load, % of {found['capacity_per_s']:.0f} calls/s")
    axes.set_title("latency, ms (open loop)", fontsize=9)
    axes.legend(frameon=False, fontsize=7, ncols=3)
    return figure


def by_run(found: Any) -> Any:
    for (transport, sandboxed), colour in RUNS.items():
        some = [one for one in found["bursts"] if (one["transport"], one["sandboxed"]) == (transport, sandboxed)]
        if some:
            yield f"{'sandbox' if sandboxed else 'echo'}, {transport}", colour, some


def draw_memory(plt: Any, found: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for words, colour, some in by_run(found):
        sizes = [one["calls"] for one in some]
        axes.plot(sizes, [one["gateway_bytes"] / 1e6 for one in some], "o-", color=colour, label=f"gateway, {words}")
        axes.plot(sizes, [one["redis_bytes"] / 1e6 for one in some], "o:", color=colour, label=f"Redis, {words}")
    axes.set_xlabel("calls in flight at once")
    axes.set_title("memory peak, MB", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    axes.set_ylim(bottom=0)
    return figure


def draw_fairness(plt: Any, found: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for words, colour, some in by_run(found):
        sizes = [one["calls"] for one in some]
        axes.plot(sizes, [one["other_p50_ms"] for one in some], "o--", color=colour, label=f"{words}, p50")
        axes.plot(sizes, [one["other_p99_ms"] for one in some], "o-", color=colour, label=f"{words}, p99")
        axes.plot(sizes, [1000 * one["call_p50_s"] for one in some], "^:", color=GREY, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("calls of the other tenant in flight (grey: its own p50)")
    axes.set_title("a second tenant's single calls, ms", fontsize=9)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def draw_scaling(plt: Any, found: Any) -> Any:
    figure, both = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    kinds = (("sleeping", "workers that take 50 ms and no CPU"), ("sandboxed", "slots of one worker, real sandboxes"))
    for axes, (name, title) in zip(both, kinds, strict=True):
        steps = found[name]
        counts = [one["count"] for one in steps]
        middles = [sorted(one["paces"])[len(one["paces"]) // 2] for one in steps]
        spread = [
            [middle - min(one["paces"]) for middle, one in zip(middles, steps, strict=True)],
            [max(one["paces"]) - middle for middle, one in zip(middles, steps, strict=True)],
        ]
        axes.plot(counts, [one["ideal_per_s"] for one in steps], "--", color=GREY, label="ideal")
        axes.errorbar(counts, middles, spread, marker="o", color=BLUE, capsize=2, label="measured")
        axes.set_xticks(counts)
        axes.set_title(f"calls/s by {title}", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw_recovery(plt: Any, found: Any) -> Any:
    runs = found["runs"]
    figure, rows = plt.subplots(len(runs), 1, figsize=(7, 2.2 * len(runs)), layout="constrained", squeeze=False, sharex=True)
    for axes, run in zip(rows[:, 0], runs, strict=True):
        axes.scatter(run["due_s"], run["latency_s"], s=4, color=BLUE)
        for name, words in (("killed_s", "killed"), ("replaced_s", "replaced")):
            axes.axvline(run[name], color=RED, linewidth=0.8, linestyle="--")
            place = axes.get_xaxis_transform()
            axes.annotate(words, (run[name], 0.9), (3, 0), place, textcoords="offset points", fontsize=7, color=RED)
        axes.set_yscale("log")
        axes.set_ylabel("latency, s")
    rows[-1, 0].set_xlabel("seconds")
    return figure


def draw_soak(plt: Any, found: Any) -> Any:
    figure, (latency, pace, memory) = plt.subplots(3, 1, figsize=(8, 6.2), layout="constrained", sharex=True)
    minutes = [one["at_s"] / 60 for one in found["windows"]]
    latency.plot(
        minutes, [one["p99_ms"] for one in found["windows"]], "o-", color=BROWN, markersize=3, label="p99 of calm calls"
    )
    latency.plot(minutes, [one["p50_ms"] for one in found["windows"]], "o-", color=BLUE, markersize=3, label="p50")
    latency.plot(minutes, [one["all_p99_ms"] for one in found["windows"]], ":", color=GREY, label="p99 of all")
    for fault in found["faults"]:
        latency.axvline(fault["at_s"] / 60, color=RED, linewidth=0.6, alpha=0.5)
    latency.set_yscale("log")
    latency.set_title("latency, ms; red: faults", fontsize=9)
    latency.legend(frameon=False, fontsize=7, ncols=3)
    pace.plot([one["at_s"] / 60 for one in found["paces"]], [one["per_s"] for one in found["paces"]], color=BLUE)
    pace.set_title("load, calls a second", fontsize=9)
    pace.set_ylim(bottom=0)
    for name, colour in (("gateway", BLUE), ("worker", BROWN), ("redis", GREY)):
        memory.plot(
            [one["at_s"] / 60 for one in found["memory"]],
            [one[name] / 1e6 for one in found["memory"]],
            color=colour,
            label=name,
        )
    memory.set_title("resident memory of the processes that lived through all of it, MB", fontsize=9)
    memory.set_xlabel("minutes")
    memory.set_ylim(bottom=0)
    memory.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    main()
