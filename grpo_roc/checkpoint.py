"""Checkpoints: a folder that is there as a whole or not at all, and that holds everything that decides the next step.

    model.safetensors config.json tokenizer…   loads with AutoModel
    optim.pt                                   the optimizer
    state.json                                 step, stage, best, hash of the settings, the stage's history

Random numbers need no file: problems, samples and selections follow from (seed, step), and nothing else is drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_roc import config

FORMAT = 1


class CheckpointError(Exception):
    pass


class State(NamedTuple):
    step: int = 0  # steps that are done
    stage: int = 0
    best: float = -1.0
    history: dict[str, Any] = {}


def settings_hash(settings: config.Config) -> str:
    """Of everything that changes what is computed; where the service is does not."""
    tree = config.as_dict(settings)
    tree.pop("service")
    tree["rl"].pop("steps")
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def save(
    folder: Path,
    *,
    model_config: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Any,
    optimizer: dict[str, Any] | None,
    state: State,
    settings: config.Config,
) -> None:
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_model(fresh, model_config, weights, tokenizer)
    if optimizer is not None:
        torch.save(optimizer, fresh / "optim.pt")
    about = state._asdict() | {"format": FORMAT, "settings": settings_hash(settings)}
    (fresh / "state.json").write_text(json.dumps(about))
    (fresh / "settings.json").write_text(json.dumps(config.as_dict(settings), indent=1))
    _sync(fresh)
    _swap(fresh, folder)


def save_model(folder: Path, model_config: Any, weights: Mapping[str, torch.Tensor], tokenizer: Any) -> None:
    from safetensors.torch import save_file

    tied = model_config.tie_word_embeddings
    whole = {
        name: value.detach().cpu().contiguous() for name, value in weights.items() if not (tied and name == "lm_head.weight")
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    model_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _sync(folder: Path) -> None:
    """On disk before it gets its name: else a power cut leaves a named folder of empty files."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _swap(fresh: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The checkpoint to go on from; after a crash between two renames it is the old one."""
    old = folder.with_name(f".{folder.name}.old")
    if not (folder / "state.json").is_file() and (old / "state.json").is_file():
        old.rename(folder)
    return folder if (folder / "state.json").is_file() else None


def load_state(folder: Path, settings: config.Config) -> State:
    about = json.loads((folder / "state.json").read_text())
    if about["format"] != FORMAT:
        raise CheckpointError(f"{folder} is of format {about['format']}, this code reads {FORMAT}")
    if about["settings"] != settings_hash(settings):
        raise CheckpointError(f"{folder} belongs to other settings; give the old ones or another --out")
    return State(about["step"], about["stage"], about["best"], about["history"])


def load_optimizer(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "optim.pt", map_location="cpu", weights_only=True)
    return state
