"""`make train-demo`: train a policy that uses its tool well from scratch, in minutes on a CPU, and write a report.

The report also measures copying: does the policy copy the operands of a problem after an unseen observation of any length? The
first call is forced to fail with a given text and the beginning of the next call is forced; the model writes the expression. A
model that copies by position fails at lengths that its training did not have.
"""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from exec_wire.messages.calls import cut_middle
from grpo_roc import chat, config, metrics
from grpo_roc.distributed import use_device
from grpo_roc.engines import make_engine
from grpo_roc.engines.base import Sampling
from grpo_roc.engines.local import LocalEngine
from grpo_roc.evaluate import run_eval
from grpo_roc.experiments import entropy, plots
from grpo_roc.experiments.common import Target, at_least, at_most, sft_model, target_table, with_service
from grpo_roc.model import load_model, load_tokenizer
from grpo_roc.rollout import Codec
from grpo_roc.runs import run_rl
from grpo_roc.tasks import make_task
from grpo_roc.tasks.arith import THOUGHTS, call_text
from grpo_roc.tasks.base import Problem

LENGTHS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 1000)  # words
REAL = {
    "NameError": (
        'Traceback (most recent call last):\n  File "/main.py", line 1, in <module>\n    pritn({0})\n    ^^^^^\n'
        "NameError: name 'pritn' is not defined. Did you mean: 'print'?"
    ),
    "SyntaxError": "  File \"/main.py\", line 1\n    print({0}\n         ^\nSyntaxError: '(' was never closed",
    "time-out": "[timed out after 0.5 s]",
    "memory limit": "[stopped: memory limit reached]",
}
_UNSEEN = "Zeppelin quartz vivid jumped oxygen fjord waltz rhythm kayak bishop glyph sphinx xylem ymir cwm".split()
_SHOWN = ("reward/mean", "err_in_pos", "err_all", "len/mean", "calls/rollout", "no_tool", "answers>1_in_pos",
          "reward/first_ok", "reward/first_error")  # fmt: skip


class Results(NamedTuple):
    """Held-out metrics after SFT, after RL, and after RL with the tool off; shares of copied operands; seconds."""

    sft: dict[str, float]
    rl: dict[str, float]
    blind: dict[str, float]
    copying: dict[str, dict[str, float]]
    s: dict[str, float]


async def run(settings: config.Config, out: Path, *, seed: int) -> bool:
    """True if every target of the report is met."""
    began = time.monotonic()
    with with_service(config.with_rl(settings, seed=seed)) as settings:
        url = settings.service.url
        start = sft_model(settings, out, seed)
        sft_s = time.monotonic() - began
        before = await run_eval(settings, start, url=url, seed=seed)
        end = await run_rl(settings, start, out / "rl")
        rl_s = time.monotonic() - began - sft_s
        after = await run_eval(settings, end, url=url, seed=seed)
        blind = await run_eval(settings, end, url=url, seed=seed, tools=False)
    copying = {name: copied_shares(settings, folder) for name, folder in (("SFT", start), ("RL", end))}
    plots.of_run(out / "rl")
    entropy.write(out / "trajectories.jsonl", after.rollouts[:256], settings, end)
    entropy.report(out / "trajectories.jsonl", out, 64)
    seconds = {"SFT": sft_s, "RL": rl_s, "all": time.monotonic() - began}
    results = Results(before.metrics, after.metrics, blind.metrics, copying, seconds)
    text = report(settings, results, metrics.read(out / "rl"))
    (out / "report.md").write_text(text)
    (out / "report.json").write_text(json.dumps(results._asdict()))
    print(text)
    return all(target.met for target in targets(results))


def targets(found: Results) -> list[Target]:
    reward = found.rl["reward/mean"]
    return [
        at_least("held-out reward", 0.93, reward),
        at_least("held-out reward above SFT", 0.08, reward - found.sft["reward/mean"]),
        at_most("reward with the tool off", 0.02, found.blind["reward/mean"]),
        at_least("operands copied, worst observation", 0.90, min(found.copying["RL"].values())),
    ]


def report(settings: config.Config, found: Results, rows: list[dict[str, float]]) -> str:
    calls, copying = int(sum(row["calls"] for row in rows)), found.copying
    held_out = [[name, *(one.get(name, 0.0) for one in (found.sft, found.rl, found.blind))] for name in _SHOWN]
    copied = [[name, *(shares[name] for shares in copying.values())] for name in copying["SFT"]]
    lines = [
        "# Training demo",
        "",
        f"Seed {settings.rl.seed}, arm {settings.rl.arm}, {len(rows)} updates, {calls:,} tool calls in training. "
        f"SFT {found.s['SFT']:.0f} s, RL {found.s['RL']:.0f} s, all {found.s['all']:.0f} s. "
        f"Held out: {int(found.rl['n'])} rollouts at temperature {settings.eval.temperature}.",
        "",
        *target_table(targets(found)),
        "",
        *metrics.table(["held out", "after SFT", "after RL", "tool off"], held_out),
        "",
        *metrics.table(["operands copied after a failed call that says", *copying], copied),
        "",
        "![training](rl/metrics.png)",
        "",
        "High-entropy tokens: [entropy.md](entropy.md), [coloured](entropy.html).",
        "",
    ]
    return "\n".join(lines)


def copied_shares(settings: config.Config, folder: Path) -> dict[str, float]:
    """The share of copied operands for every kind of observation, cut in the middle as the environment cuts it."""
    model = load_model(folder, settings.model, use_device(settings))
    engine = make_engine(settings, folder, model.state_dict(), lockstep=True)
    assert isinstance(engine, LocalEngine)
    codec, problems = Codec(load_tokenizer(folder), settings.chat), make_task(settings).benchmarks(128)["heldout"]
    rng = random.Random("copying")
    texts = {f"{words} unseen words": [" ".join(rng.choices(_UNSEEN, k=words)) for _ in problems] for words in LENGTHS}
    texts |= {name: [text.format(problem.id) for problem in problems] for name, text in REAL.items()}
    cut = {name: [cut_middle(text, settings.chat.observation_chars) for text in those] for name, those in texts.items()}
    return {name: _copied_share(engine, codec, problems, observations) for name, observations in cut.items()}


def _copied_share(engine: LocalEngine, codec: Codec, problems: Sequence[Problem], observations: Sequence[str]) -> float:
    """The share of second calls with the whole expression right, at temperature 1."""
    requests = []
    for number, (problem, text) in enumerate(zip(problems, observations, strict=True)):
        ids = codec.prompt(problem.text) + codec.ids(THOUGHTS["run"] + call_text(problem.id, "name") + chat.END)
        ids += codec.observation([text]) + codec.ids(f"{THOUGHTS['fix']}<tool_call>{chat.CALL_HEAD}print(")
        requests.append((f"copy-{number}", ids, Sampling(24, 1.0, codec.stop, (0, number))))
    generated = engine.generate_all(requests)
    for name, _, _ in requests:
        engine.drop(name)
    right = [codec.text(one.ids).startswith(problem.id) for one, problem in zip(generated, problems, strict=True)]
    return sum(right) / len(right)
