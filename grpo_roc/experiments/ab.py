"""Arms against each other: the same start, problems, seeds and number of updates; only the selection differs.

grpo     G rollouts, all kept
uniform  2G rollouts, G kept by lot: what oversampling alone does
roc      2G rollouts, G kept by RoC
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec

from grpo_roc import config, metrics, runs
from grpo_roc.env import service_url
from grpo_roc.experiments import plots

Found = dict[str, dict[int, dict[str, float]]]
SHOWN = {
    "reward/mean": "reward",
    "err_in_pos": "tool errors in correct rollouts",
    "len/mean": "tokens",
    "answers>1_in_pos": "double answers in correct",
    "answers>1": "double answers",
    "calls/rollout": "calls",
    "no_tool": "no tool",
}


async def run(settings: config.Config, out: Path, model: Path | None, arms: list[str], seeds: list[int]) -> str:
    """Runs that are finished are not made again, so this may be stopped and started."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    with service_url(settings.service) as url:
        settings = msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, url=url))
        start = model or _sft(settings, out)
        base, _ = await runs.run_eval(settings, start, url=url, seed=0)
        found: Found = {arm: {} for arm in arms}
        for seed in seeds:
            for arm in arms:
                found[arm][seed] = await _one(settings, start, out / f"{arm}-{seed}", arm, seed, url)
    curves = {arm: [metrics.read(out / f"{arm}-{seed}") for seed in seeds] for arm in arms}
    plots.of_arms(curves, out / "ab.png")
    words = report(settings, base, found, time.monotonic() - began)
    (out / "ab.md").write_text(words)
    (out / "ab.json").write_text(json.dumps({"sft": base, "arms": found}, indent=1))
    return words


def _sft(settings: config.Config, out: Path) -> Path:
    if not (out / "sft" / "model").exists():
        runs.make_tiny(settings, out / "tiny")
        runs.run_sft(settings, out / "tiny", out / "sft")
    return out / "sft" / "model"


async def _one(settings: config.Config, start: Path, out: Path, arm: Any, seed: int, url: str) -> dict[str, float]:
    done = out / "eval.json"
    if not done.exists():
        mine = config.with_rl(settings, arm=arm, seed=seed)
        end = await runs.run_rl(mine, start, out)
        found, _ = await runs.run_eval(mine, end, url=url, seed=seed)
        done.write_text(json.dumps(found))
    read: dict[str, float] = json.loads(done.read_text())
    return read


def report(settings: config.Config, base: dict[str, float], found: Found, seconds: float) -> str:
    rl, noise = settings.rl, settings.noise
    seeds = sorted(next(iter(found.values())))
    lines = [
        f"Held out, temperature {settings.eval.temperature}, {int(base['n'])} rollouts per run, no injected faults in the "
        f"evaluation. Training: {rl.steps} updates, {rl.prompts} prompts, G={rl.group}, lr {rl.lr}, fault_rate "
        f"{noise.fault_rate}, corrupt_rate {noise.corrupt_rate}, seeds {', '.join(map(str, seeds))}. {seconds / 60:.0f} min.",
        "",
        "| arm | seed | " + " | ".join(SHOWN.values()) + " |",
        "| --- | --- |" + " ---: |" * len(SHOWN),
        "| after SFT | | " + " | ".join(f"{base[name]:.3f}" for name in SHOWN) + " |",
    ]
    for arm, by_seed in found.items():
        for seed in seeds:
            lines.append(f"| {arm} | {seed} | " + " | ".join(f"{by_seed[seed][name]:.3f}" for name in SHOWN) + " |")
        lines.append(
            f"| **{arm}** | mean ± sd | " + " | ".join(_spread([by_seed[s][name] for s in seeds]) for name in SHOWN) + " |"
        )
    return "\n".join([*lines, "", *_targets(found), ""])


def _targets(found: Found) -> list[str]:
    if not {"grpo", "roc"} <= set(found):
        return []
    mean = {arm: {name: _mean([row[name] for row in found[arm].values()]) for name in SHOWN} for arm in ("grpo", "roc")}
    grpo, roc = mean["grpo"], mean["roc"]
    errors = roc["err_in_pos"] / max(1e-9, grpo["err_in_pos"])
    tokens = roc["len/mean"] / grpo["len/mean"]
    rows = [
        ("tool errors in correct rollouts, roc / grpo", "≤ 0.25", errors, errors <= 0.25),
        ("mean response tokens, roc / grpo", "≤ 0.88", tokens, tokens <= 0.88),
        ("double answers, roc", "≤ 0.05", roc["answers>1"], roc["answers>1"] <= 0.05),
        (
            "reward, roc - grpo",
            "≥ -0.02",
            roc["reward/mean"] - grpo["reward/mean"],
            roc["reward/mean"] >= grpo["reward/mean"] - 0.02,
        ),
    ]
    return [
        "| target | wanted | found | |",
        "| --- | --- | ---: | --- |",
        *(f"| {name} | {wanted} | {value:.3f} | {'met' if met else '**missed**'} |" for name, wanted, value, met in rows),
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _spread(values: list[float]) -> str:
    mean = _mean(values)
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
    return f"{mean:.3f} ± {sd:.3f}"
