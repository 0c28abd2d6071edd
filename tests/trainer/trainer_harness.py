"""Settings and made-up rollouts for the trainer's tests."""

from pathlib import Path
from typing import Any

from grpo_roc import config
from grpo_roc.model import make_tiny
from grpo_roc.rollout import Trajectory

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


def small_model(folder: Path) -> Path:
    make_tiny(TINY, folder)
    return folder


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
