"""The dashboards of the chart as pictures in docs/images: `make dashboards`.

A real service runs under load, a real Prometheus scrapes it, and every panel's query goes through its API. matplotlib draws
what Grafana would, without the series that are always 0. An argument is the number of seconds of load.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter
from observe_harness import DASHBOARDS, ROOT, Prometheus, filled, scraping
from service_harness import serving
from web_harness import load

STEP_S = 1
UNITS = {
    "s": lambda value: f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms",
    "percentunit": lambda value: f"{value * 100:.3g} %",
    "bytes": lambda value: f"{value / 2**20:.3g} MiB" if value >= 2**20 else f"{value / 2**10:.3g} KiB",
    "bool_yes_no": lambda value: "yes" if value else "no",
    "cps": lambda value: f"{value:.3g}/s",
    "reqps": lambda value: f"{value:.3g}/s",
}


def shown(panel: dict[str, Any], value: float) -> str:
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    return UNITS.get(unit, lambda value: f"{value:.4g}")(value)


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), target.get("legendFormat", ""))


def draw(panel: dict[str, Any], axes: Any, prometheus: Prometheus, began: float, end: float) -> None:
    axes.set_title(panel["title"], fontsize=9, loc="left")
    if panel["type"] == "timeseries":
        draw_lines(panel, axes, prometheus, began, end)
        return
    axes.axis("off")
    found = [
        (legend(target, sample["metric"]), float(sample["value"][1]))
        for target in panel["targets"]
        for sample in prometheus.query(filled(target["expr"]))
    ]
    if panel["type"] == "stat" and len(found) == 1:
        [(name, value)] = found
        text = f"{name}: {shown(panel, value)}" if "{{" in panel["targets"][0]["legendFormat"] else shown(panel, value)
        axes.text(0.5, 0.4, text, fontsize=18, ha="center", va="center")
        return
    text = "\n".join(f"{name}: {shown(panel, value)}" for name, value in sorted(found))
    axes.text(0.02, 0.95, text, fontsize=9, va="top", transform=axes.transAxes)


def draw_lines(panel: dict[str, Any], axes: Any, prometheus: Prometheus, began: float, end: float) -> None:
    for target in panel["targets"]:
        parameters = {"query": filled(target["expr"]), "start": began, "end": end, "step": STEP_S}
        answer = prometheus.http.get("/api/v1/query_range", params=parameters).json()
        assert answer["status"] == "success", answer
        for series in answer["data"]["result"]:
            times, values = zip(*((float(at) - began, float(value)) for at, value in series["values"]), strict=True)
            if any(values):
                axes.plot(times, values, linewidth=1, label=legend(target, series["metric"]) or "none")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(panel, value)))
    axes.tick_params(labelsize=7)
    axes.margins(y=0.3)
    axes.set_ylim(bottom=0)
    if panel["fieldConfig"]["defaults"].get("unit") == "bool_yes_no":
        axes.set_yticks([0, 1])
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, loc="upper left", framealpha=0.5)
    else:
        axes.text(0.5, 0.5, "all 0", transform=axes.transAxes, ha="center")
        axes.set_xticks([])
        axes.set_yticks([])


def draw_dashboard(file: Path, prometheus: Prometheus, began: float, end: float) -> None:
    dashboard = json.loads(file.read_text())
    panels = dashboard["panels"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    inches = (height + 1) * 0.36
    figure = plt.figure(figsize=(13, inches))
    for panel in panels:
        box = panel["gridPos"]
        left, right, top, bottom = (0.04, 0.01, 0.5, 0.3) if panel["type"] == "timeseries" else (0.01, 0.01, 0.5, 0.0)
        upper = 1 - (box["y"] + 1) / (height + 1) - top * 0.36 / inches
        lower = 1 - (box["y"] + 1 + box["h"]) / (height + 1) + bottom / inches
        x, width = box["x"] / 24 + left, box["w"] / 24 - left - right
        axes = figure.add_axes((x, lower, width, upper - lower))
        if panel["type"] == "row":
            axes.set_position((x, lower, width, 0.36 / inches))
            axes.axis("off")
            axes.text(0, 0.2, panel["title"], fontsize=11, fontweight="bold")
        else:
            draw(panel, axes, prometheus, began, end)
    figure.suptitle(f"{dashboard['title']}", fontsize=12, x=0.01, ha="left", y=1 - 0.1 / inches)
    picture = ROOT / "docs" / "images" / f"dashboard-{file.stem}.png"
    figure.savefig(picture, dpi=90)
    plt.close(figure)
    print(picture.relative_to(ROOT))


def main() -> None:
    matplotlib.use("Agg")
    load_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with (
        serving(profiles='{"bare": [], "numpy": ["numpy"]}', slots=6) as service,
        tempfile.TemporaryDirectory() as folder,
        scraping(service.url, Path(folder)) as prometheus,
    ):
        began = time.time()
        with load(service.url, callers=2, per_batch=8):
            time.sleep(load_s)
            for file in DASHBOARDS:
                draw_dashboard(file, prometheus, began, time.time())


if __name__ == "__main__":
    main()
