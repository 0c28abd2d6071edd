"""Settings and made-up rollouts for the trainer's tests."""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import wait_until
from service_harness import Service

from grpo_roc import config, metrics
from grpo_roc.batches import Sample
from grpo_roc.model import make_tiny
from grpo_roc.rollout import Trajectory
from grpo_roc.runs import run_rl
from loadtest.support.processes import free_port

ROOT = Path(__file__).parents[2]
TINY = config.load(
    None,
    """chat.system=short chat.observation_chars=100 model.layers=2 sft.steps=130 sft.batch=28 sft.micro=4 sft.lr=3e-3
    sft.warmup=20 rl.prompts=2 rl.group=4 rl.steps=6 rl.max_response=300 eval.max_response=300 service.timeout_s=0.5
    service.memory_mb=64 threads=1""".split(),
)


def with_settings(*changes: str, base: config.Config = TINY) -> config.Config:
    import msgspec

    tree = config.as_dict(base)
    for change in changes:
        config._put(tree, change)
    return msgspec.convert(tree, config.Config)


def settings_at(service: Service, *changes: str) -> config.Config:
    return with_settings(f"service.url={service.url}", *changes)


def start_python(*arguments: str) -> subprocess.Popen[bytes]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=variables, stderr=subprocess.DEVNULL)


def write_settings(settings: config.Config, folder: Path) -> str:
    (folder / "settings.json").write_text(json.dumps(config.as_dict(settings)))
    return str(folder / "settings.json")


def rows_without_times(out: Path) -> list[dict[str, Any]]:
    """Without the times, which differ between runs of the same seed."""
    clocks = ("time/", "service/", "speed/")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in metrics.read(out)]


def wait_for_rows(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    wait_until(lambda: len(metrics.read(out)) >= count or process.poll() is not None, f"{count} rows", 600)
    assert process.poll() is None, "the run ended"


def kill_dash_nine_and_resume(settings: config.Config, model: Path, out: Path) -> None:
    """Kill the run within its six steps."""
    process = start_python("-c", RUN, write_settings(settings, out), str(model), str(out))
    wait_for_rows(process, out, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(metrics.read(out)) < settings.rl.steps
    asyncio.run(run_rl(settings, model, out, eval_problems=8))


RUN = """
import asyncio, sys
from pathlib import Path
from grpo_roc import config
from grpo_roc.runs import run_rl
settings, model, out = sys.argv[1:]
asyncio.run(run_rl(config.load(settings), Path(model), Path(out), eval_problems=8))
"""


def small_model(folder: Path) -> Path:
    make_tiny(TINY, folder)
    return folder


def samples(count: int = 6) -> list[Sample]:
    made = []
    for number in range(count):
        length = 6 + 3 * number
        mask = [0] * 3 + [1] * (length - 3)
        ids = [(7 * number + place) % 60 + 1 for place in range(length)]
        made.append(Sample(ids, mask, [-1.0] * length, 1.0 if number % 2 else -1.0, number // 2))
    return made


def run_ranks(world: int, run: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run `run(*arguments)` as the ranks of one job; returns their exit codes."""
    fork = multiprocessing.get_context("fork")  # importing torch in every rank would take longer than a test
    port = free_port()

    def start(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank)}
        run(*arguments)

    ranks = [fork.Process(target=start, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    return [rank.exitcode for rank in ranks]


def rollout(reward: float | None = 1.0, outcomes: tuple[str, ...] = ("ok",), **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "problem": "p",
        "truth": "1",
        "group": 0,
        "sample": 0,
        "prompt": [1, 2],
        "ids": [3, 4, 5],
        "mask": [1, 0, 1],
        "logprobs": [-1.0, 0.0, -1.0],
        "outcomes": list(outcomes),
        "answers": 1,
        "turns": 2,
        "reward": reward,
    }
    return Trajectory(**(fields | changes))
