"""A pretrained model learns to use the tool: SFT for the format, GRPO-RoC, and held-out accuracy before and after.

Problems are those of reasoning-gym (`tasks/reasoning.py`). Every part that is done is kept in `out`, so that the run can be
interrupted and started again.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_roc import config, metrics
from grpo_roc.evaluate import run_eval
from grpo_roc.experiments import plots
from grpo_roc.experiments.common import with_service
from grpo_roc.runs import run_rl
from grpo_roc.sft import run_sft

ARMS = {
    "after SFT": ("sft", True),
    "after SFT, no tool": ("sft", False),
    "after RL": ("rl", True),
    "after RL, no tool": ("rl", False),
}
SHOWN = {
    "err_in_pos": "tool errors in correct rollouts",
    "err_all": "tool errors",
    "len/mean": "tokens",
    "calls/rollout": "calls",
    "no_tool": "no tool",
    "clip_ratio": "truncated",
}
Found = dict[str, dict[str, Any]]


def run(settings: config.Config, start: Path, out: Path) -> str:
    """Returns the report, which is also in `out/report.md`."""
    out.mkdir(parents=True, exist_ok=True)
    models = {"sft": out / "sft" / "model", "rl": out / "rl" / "model"}
    if not models["sft"].exists():
        _timed(out, "SFT", lambda: run_sft(settings, start, out / "sft"))
    found: Found = {}
    with with_service(settings) as settings:
        for name, (kind, tools) in ARMS.items():
            if not models[kind].exists():
                _timed(out, "RL", lambda: asyncio.run(run_rl(settings, models["sft"], out / "rl")))
            found[name] = _evaluate(settings, models[kind], out / f"eval-{kind}-{'tool' if tools else 'no-tool'}.json", tools)
    rows = metrics.read(out / "rl")
    plots.of_run(out / "rl")
    text = report(settings, found, rows, json.loads((out / "seconds.json").read_text()))
    (out / "report.md").write_text(text)
    return text


def _timed(out: Path, name: str, act: Any) -> None:
    """Add the seconds to those of earlier, interrupted tries that ended with a checkpoint."""
    began, path = time.monotonic(), out / "seconds.json"
    try:
        act()
    finally:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {name: known.get(name, 0.0) + time.monotonic() - began}))


def _evaluate(settings: config.Config, model: Path, path: Path, tools: bool) -> dict[str, Any]:
    if not path.exists():
        found = asyncio.run(run_eval(settings, model, url=settings.service.url, tools=tools))
        path.write_text(json.dumps(found.as_dict()))
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def report(settings: config.Config, found: Found, rows: Sequence[dict[str, Any]], seconds: dict[str, float]) -> str:
    rl, names = settings.rl, list(next(iter(found.values()))["benchmarks"])
    shown = [name for name in names if name not in settings.task.demonstrated]
    accuracy = [
        [name if name in shown else f"{name}, demonstrated", *(_score(one["benchmarks"][name]) for one in found.values())]
        for name in names
    ]
    habits = [[title, *(one["metrics"].get(name, 0.0) for one in found.values())] for name, title in SHOWN.items()]
    tools = int(sum(row["calls"] for row in rows))
    lines = [
        "# A pretrained model learns to use the tool",
        "",
        f"{Path(settings.model.path).name}, seed {rl.seed}, arm {rl.arm}. SFT: {settings.sft.steps} steps, "
        f"{_minutes(seconds, 'SFT')}. RL: {len(rows)} updates of {rl.prompts} prompts with {rl.group * rl.oversample} rollouts "
        f"each, {tools:,} tool calls, {_minutes(seconds, 'RL')}. Held out: {settings.eval.problems} problems of each data set, "
        f"{settings.eval.samples} samples, temperature {settings.eval.temperature}; mean ± standard error over problems.",
        "",
        *metrics.table(["accuracy", *found], accuracy),
        "",
        *metrics.table(["habits", *found], habits),
        "",
        "![training](rl/metrics.png)",
        "",
    ]
    return "\n".join(lines)


def _score(one: dict[str, Any]) -> str:
    return f"{one['mean']:.3f}" + (f" ± {one['error']:.3f}" if one["error"] is not None else "")


def _minutes(seconds: dict[str, float], name: str) -> str:
    return f"{seconds.get(name, 0.0) / 60:.0f} min"
