"""Shared by the experiments: one service, one SFT model, a table of targets."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from grpo_roc import config, metrics
from grpo_roc.env import service_url
from grpo_roc.model import make_tiny
from grpo_roc.sft import run_sft


class Target(NamedTuple):
    name: str
    wanted: str
    found: float
    met: bool


def at_least(name: str, wanted: float, found: float) -> Target:
    return Target(name, f"≥ {wanted:.2f}", found, found >= wanted)


def at_most(name: str, wanted: float, found: float) -> Target:
    return Target(name, f"≤ {wanted:.2f}", found, found <= wanted)


def target_table(targets: Iterable[Target]) -> list[str]:
    rows = ([one.name, one.wanted, one.found, "met" if one.met else "**missed**"] for one in targets)
    return metrics.table(["target", "wanted", "found", ""], rows, 2)


@contextlib.contextmanager
def with_service(settings: config.Config) -> Iterator[config.Config]:
    """The settings with the address of a service, which runs for the duration of the block if they have none."""
    with service_url(settings.service) as url:
        yield msgspec.structs.replace(settings, service=msgspec.structs.replace(settings.service, url=url))


def sft_model(settings: config.Config, out: Path, seed: int = 0) -> Path:
    """The SFT model in `out/sft/model`; made if it is not there."""
    if not (out / "sft" / "model").exists():
        make_tiny(settings, out / "tiny", seed)
        run_sft(settings, out / "tiny", out / "sft", seed=seed)
    return out / "sft" / "model"
