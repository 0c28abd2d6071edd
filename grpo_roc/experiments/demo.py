"""`make train-demo`: from nothing to a policy that uses its tool well, in minutes on a CPU, with a report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from grpo_roc import build, config, copying, metrics, runs
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import service_url
from grpo_roc.experiments import entropy, plots


class Target(NamedTuple):
    name: str
    wanted: str
    found: float
    met: bool


async def run(settings: config.Config, out: Path, *, seed: int) -> bool:
    """True if every target of the report is met."""
    began = time.monotonic()
    settings = config.with_rl(settings, seed=seed)
    with service_url(settings.service) as url:
        settings = msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, url=url))
        if not (out / "sft" / "model").exists():
            runs.make_tiny(settings, out / "tiny", seed)
            runs.run_sft(settings, out / "tiny", out / "sft", seed=seed)
        start, sft_s = out / "sft" / "model", time.monotonic() - began
        before, _ = await runs.run_eval(settings, start, url=url, seed=seed)
        end = await runs.run_rl(settings, start, out / "rl")
        rl_s = time.monotonic() - began - sft_s
        after, rollouts = await runs.run_eval(settings, end, url=url, seed=seed)
        blind, _ = await runs.run_eval(settings, end, url=url, seed=seed, tools=False)
    copies = {name: _copies(settings, folder) for name, folder in (("SFT", start), ("RL", end))}
    plots.of_run(out / "rl")
    entropy.write(out / "trajectories.jsonl", rollouts[:256], build.codec(settings, build.tokenizer(end)))
    entropy.report(out / "trajectories.jsonl", out, 64)
    found = targets(before, after, blind, copies)
    seconds = {"SFT": sft_s, "RL": rl_s, "all": time.monotonic() - began}
    words = report(settings, before, after, blind, copies, found, seconds, metrics.read(out / "rl"))
    (out / "report.md").write_text(words)
    (out / "report.json").write_text(json.dumps({"sft": before, "rl": after, "blind": blind, "copying": copies, "s": seconds}))
    print(words)
    return all(target.met for target in found)


def _copies(settings: config.Config, folder: Path) -> dict[str, float]:
    model = build.model(folder, settings.model, runs.prepare(settings))
    engine = build.engines(settings, folder, model.state_dict())[0]
    assert isinstance(engine, LocalEngine)
    codec = build.codec(settings, build.tokenizer(folder))
    return copying.by_length(engine, codec, build.task(settings).heldout(128), settings.chat.observation_chars)


def targets(
    before: dict[str, float], after: dict[str, float], blind: dict[str, float], copies: dict[str, dict[str, float]]
) -> list[Target]:
    gain, reward, worst = after["reward/mean"] - before["reward/mean"], after["reward/mean"], min(copies["RL"].values())
    return [
        Target("held-out reward", "≥ 0.93", reward, reward >= 0.93),
        Target("held-out reward above SFT", "≥ 0.08", gain, gain >= 0.08),
        Target("reward with the tool off", "≤ 0.02", blind["reward/mean"], blind["reward/mean"] <= 0.02),
        Target("operands copied, worst observation", "≥ 0.90", worst, worst >= 0.90),
    ]


def report(
    settings: config.Config,
    before: dict[str, float],
    after: dict[str, float],
    blind: dict[str, float],
    copies: dict[str, dict[str, float]],
    found: list[Target],
    seconds: dict[str, float],
    rows: list[dict[str, float]],
) -> str:
    calls = int(sum(row["calls"] for row in rows))
    lines = [
        "# Training demo",
        "",
        f"Seed {settings.rl.seed}, arm {settings.rl.arm}, {len(rows)} updates, {calls:,} tool calls in training. "
        f"SFT {seconds['SFT']:.0f} s, RL {seconds['RL']:.0f} s, all {seconds['all']:.0f} s. "
        f"Held out: {int(after['n'])} rollouts at temperature {settings.eval.temperature}.",
        "",
        "| target | wanted | found | |",
        "| --- | --- | ---: | --- |",
        *(f"| {one.name} | {one.wanted} | {one.found:.3f} | {'met' if one.met else '**missed**'} |" for one in found),
        "",
        "| held out | after SFT | after RL | tool off |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {name} | {before.get(name, 0.0):.3f} | {after.get(name, 0.0):.3f} | {blind.get(name, 0.0):.3f} |"
            for name in _SHOWN
        ),
        "",
        "| operands copied after a failed call that says | SFT | RL |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {share:.3f} | {copies['RL'][name]:.3f} |" for name, share in copies["SFT"].items()),
        "",
        "![training](rl/metrics.png)",
        "",
        "High-entropy tokens: [entropy.md](entropy.md), [coloured](entropy.html).",
        "",
    ]
    return "\n".join(lines)


_SHOWN = (
    "reward/mean",
    "err_in_pos",
    "err_all",
    "len/mean",
    "calls/rollout",
    "no_tool",
    "answers>1_in_pos",
    "reward/first_ok",
    "reward/first_error",
)
