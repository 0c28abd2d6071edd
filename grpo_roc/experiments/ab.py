"""Compare arms with the same start, problems, seeds and number of updates; only the selection differs.

grpo     G rollouts, all kept
uniform  2G rollouts, G kept at random: the effect of oversampling alone
roc      2G rollouts, G kept by RoC
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from grpo_roc import config, metrics
from grpo_roc.evaluate import run_eval
from grpo_roc.experiments import plots
from grpo_roc.experiments.common import Target, at_least, at_most, sft_model, target_table, with_service
from grpo_roc.runs import run_rl

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
    """Finished runs are not repeated, so the comparison can be interrupted and started again."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    with with_service(settings) as settings:
        start = model or sft_model(settings, out)
        base = (await run_eval(settings, start, url=settings.service.url, seed=0)).metrics
        found: Found = {arm: {} for arm in arms}
        for seed in seeds:
            for arm in arms:
                found[arm][seed] = await _run_arm(settings, start, out / f"{arm}-{seed}", arm, seed)
    curves = {arm: [metrics.read(out / f"{arm}-{seed}") for seed in seeds] for arm in arms}
    plots.of_arms(curves, out / "ab.png")
    text = report(settings, base, found, time.monotonic() - began)
    (out / "ab.md").write_text(text)
    (out / "ab.json").write_text(json.dumps({"sft": base, "arms": found}, indent=1))
    return text


async def _run_arm(settings: config.Config, start: Path, out: Path, arm: Any, seed: int) -> dict[str, float]:
    done = out / "eval.json"
    if not done.exists():
        settings = config.with_rl(settings, arm=arm, seed=seed)
        end = await run_rl(settings, start, out)
        done.write_text(json.dumps((await run_eval(settings, end, url=settings.service.url, seed=seed)).metrics))
    read: dict[str, float] = json.loads(done.read_text())
    return read


def report(settings: config.Config, base: dict[str, float], found: Found, seconds: float) -> str:
    rl, noise = settings.rl, settings.noise
    seeds = sorted(next(iter(found.values())))
    rows = [["after SFT", "", *(base[name] for name in SHOWN)]]
    for arm, by_seed in found.items():
        rows += [[arm, seed, *(by_seed[seed][name] for name in SHOWN)] for seed in seeds]
        rows.append([f"**{arm}**", "mean ± sd", *(_spread([by_seed[seed][name] for seed in seeds]) for name in SHOWN)])
    lines = [
        f"Held out, temperature {settings.eval.temperature}, {int(base['n'])} rollouts per run, no injected faults in the "
        f"evaluation. Training: {rl.steps} updates, {rl.prompts} prompts, G={rl.group}, lr {rl.lr}, fault_rate "
        f"{noise.fault_rate}, corrupt_rate {noise.corrupt_rate}, seeds {', '.join(map(str, seeds))}. {seconds / 60:.0f} min.",
        "",
        *metrics.table(["arm", "seed", *SHOWN.values()], rows, 2),
    ]
    if {"grpo", "roc"} <= set(found):
        lines += ["", *target_table(targets(found))]
    return "\n".join([*lines, ""])


def targets(found: Found) -> list[Target]:
    grpo, roc = (
        {name: statistics.fmean(row[name] for row in found[arm].values()) for name in SHOWN} for arm in ("grpo", "roc")
    )
    return [
        at_most("tool errors in correct rollouts, roc / grpo", 0.25, roc["err_in_pos"] / max(1e-9, grpo["err_in_pos"])),
        at_most("mean response tokens, roc / grpo", 0.88, roc["len/mean"] / grpo["len/mean"]),
        at_most("double answers, roc", 0.05, roc["answers>1"]),
        at_least("reward, roc - grpo", -0.02, roc["reward/mean"] - grpo["reward/mean"]),
    ]


def _spread(values: list[float]) -> str:
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {sd:.3f}"
