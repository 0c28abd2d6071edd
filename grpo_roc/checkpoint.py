"""Checkpoints: a folder that is complete or absent, with everything that the next step depends on.

    model.safetensors config.json tokenizer…   loads with AutoModel
    optim.pt                                   the optimizer (only in `latest`)
    shards, optimizer_shards                   under fsdp2 instead of both, in `latest` (see `sharded.py`)
    rollouts.msgpack                           of the next step, if they were made during the last update (see `overlap.py`)
    state.json                                 step, stage, best, hash of the settings, the stage's history

The state of random generators is not needed: every random draw depends on (seed, step) alone.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from grpo_roc import config

FORMAT = 1


class CheckpointError(Exception):
    pass


class State(NamedTuple):
    step: int = 0  # completed steps
    stage: int = 0
    best: float = -1.0
    history: dict[str, Any] = {}


def settings_hash(settings: config.Config) -> str:
    """A hash of the settings that affect the result: not of the number of steps, service, record and addresses of engines."""
    tree = config.as_dict(settings)
    tree.pop("service")
    tree.pop("record")
    tree["rl"].pop("steps")
    for engine in tree["engines"]:
        engine.pop("url")
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def save(
    folder: Path,
    model_config: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Any,
    optimizer: dict[str, Any] | None,
    state: State,
    settings: config.Config,
) -> None:
    """What one process has: see `sharded.save` for all ranks."""
    fresh = temporary(folder)
    begin(fresh)
    save_weights(untied(weights, model_config), fresh)
    if optimizer is not None:
        save_optimizer(optimizer, fresh)
    finish(fresh, folder, model_config, tokenizer, state, settings)


def temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.new")


def begin(fresh: Path) -> None:
    shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
    fresh.mkdir(parents=True)


def finish(fresh: Path, folder: Path, model_config: Any, tokenizer: Any, state: State, settings: config.Config) -> None:
    """Describe the temporary folder, flush it to disk, and rename it."""
    model_config.save_pretrained(fresh)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
    about = state._asdict() | {"format": FORMAT, "settings": settings_hash(settings)}
    (fresh / "state.json").write_text(json.dumps(about))
    (fresh / "settings.json").write_text(json.dumps(config.as_dict(settings), indent=1))
    _sync(fresh)
    _swap(fresh, folder)


def untied(weights: Mapping[str, torch.Tensor], model_config: Any) -> dict[str, torch.Tensor]:
    """Without the output layer of a model whose output layer is its embedding: it is no weight of its own."""
    tied = model_config.tie_word_embeddings
    return {name: value for name, value in weights.items() if not (tied and name == "lm_head.weight")}


def save_optimizer(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / "optim.pt")


def save_rollouts(encoded: bytes, folder: Path) -> None:
    if encoded:
        (folder / "rollouts.msgpack").write_bytes(encoded)


def load_rollouts(folder: Path) -> bytes:
    path = folder / "rollouts.msgpack"
    return path.read_bytes() if path.exists() else b""


def save_weights(
    weights: Mapping[str, torch.Tensor], folder: Path | None, dtype: torch.dtype | None = None, shard_bytes: int = 4 << 30
) -> None:
    """As safetensors: one file, or several with an index. Only one of them is converted to `dtype` and in memory at a time.

    Sharded weights are gathered file by file, which is collective; the ranks without a folder only take part in that.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, value in weights.items():
        bytes_ = value.numel() * (dtype or value.dtype).itemsize
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += bytes_
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        whole = {name: _whole(weights[name], dtype) for name in names}
        if folder is not None:
            save_file(whole, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1 and folder is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _whole(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().to("cpu", dtype).contiguous()


def _sync(folder: Path) -> None:
    """Flush to disk before the rename: after a power cut the folder could otherwise have empty files."""
    for path in [*folder.rglob("*"), folder]:
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
    """The checkpoint to resume from; after a crash between the two renames of `_swap` it is the old one."""
    old = folder.with_name(f".{folder.name}.old")
    if not (folder / "state.json").is_file() and (old / "state.json").is_file():
        old.rename(folder)
    return folder if (folder / "state.json").is_file() else None


def load_state(folder: Path, settings: config.Config) -> State:
    about = json.loads((folder / "state.json").read_text())
    if about["format"] != FORMAT:
        raise CheckpointError(f"{folder} has format {about['format']}, this version reads {FORMAT}")
    if about["settings"] != settings_hash(settings):
        raise CheckpointError(f"{folder} was made with other settings; use those, or another --out")
    return State(about["step"], about["stage"], about["best"], about["history"])


def load_optimizer(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "optim.pt", map_location="cpu", weights_only=True)
    return state
