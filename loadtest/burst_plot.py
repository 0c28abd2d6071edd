"""Draws bursts: `python burst_plot.py RESULTS.json PICTURE.png`. Needs matplotlib and nothing of this project."""

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {(False, "http"): "#1b4f72", (False, "grpc"): "#4b8bbe", (True, "http"): "#c0763a", (True, "grpc"): "#e0a96d"}


def main() -> None:
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    bursts = json.loads(Path(sys.argv[1]).read_text())["bursts"]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (speed, latency, memory) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for (sandboxed, transport), colour in COLOURS.items():
        some = [one for one in bursts if (one["sandboxed"], one["transport"]) == (sandboxed, transport)]
        if not some:
            continue
        words = f"{'sandbox' if sandboxed else 'echo'}, {transport}"
        draw(speed, some, "calls_per_s", words, colour)
        draw(latency, some, "other_p50_ms", f"{words}, p50", colour, "--")
        draw(latency, some, "other_p99_ms", f"{words}, p99", colour)
        draw(memory, some, "gateway_bytes", f"gateway, {words}", colour, scale=1e6)
        draw(memory, some, "redis_bytes", f"Redis, {words}", colour, ":", scale=1e6)
    latency.axhline(1000, color="#b03a2e", linewidth=0.8)
    titles = {speed: "calls per second", latency: "the second tenant's single calls, ms", memory: "memory peak, MB"}
    for axes, title in titles.items():
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("calls in flight at once")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(sys.argv[2], dpi=150)


def draw(
    axes: Any, bursts: list[dict[str, Any]], name: str, label: str, colour: str, line: str = "-", scale: float = 1
) -> None:
    sizes, values = [one["calls"] for one in bursts], [one[name] / scale for one in bursts]
    axes.plot(sizes, values, line, marker="o", markersize=3, color=colour, label=label)


if __name__ == "__main__":
    main()
