"""Engines generate tokens, in this process (`local`) or over HTTP (`vllm`, `sglang`), behind one protocol (`base`)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from grpo_roc import config
from grpo_roc.engines.base import Engine
from grpo_roc.engines.direct import make_direct
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.sglang import SglangEngine
from grpo_roc.engines.vllm import VllmEngine


def make_engine(settings: config.Config, folder: Path, weights: Mapping[str, Any], *, lockstep: bool) -> Engine:
    """The first engine alone for lockstep rollouts, else a scheduler over all of them."""
    engines = make_engines(settings, folder, weights)
    if not lockstep:
        return Scheduler(engines, settings.scheduler)
    if not isinstance(engines[0], LocalEngine):
        raise config.ConfigError("rl.lockstep needs one local engine; set rl.lockstep=false for others")
    return engines[0]


def make_engines(settings: config.Config, folder: Path, weights: Mapping[str, Any]) -> list[Engine]:
    addresses = [(one, url) for one in settings.engines for url in expand(one.url)]
    return [_make(one, url, folder, weights, number) for number, (one, url) in enumerate(addresses)]


def _make(one: config.Engine, url: str, folder: Path, weights: Mapping[str, Any], number: int) -> Engine:
    if one.kind == "local":
        return LocalEngine(AutoConfig.from_pretrained(str(folder)), weights, one, f"local-{number}")
    kind = VllmEngine if one.kind == "vllm" else SglangEngine
    return kind(url, make_direct(one, url))


def expand(url: str) -> list[str]:
    """`http://host:3000{0..3}` stands for four addresses."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", url)
    if not found:
        return [url]
    return [url[: found.start()] + str(n) + url[found.end() :] for n in range(int(found[1]), int(found[2]) + 1)]
