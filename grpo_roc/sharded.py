"""Models and checkpoints of all ranks. A sharded model (fsdp2) is read and written shard by shard: no process holds it whole.

Each rank reads its part of a published model's safetensors. A checkpoint to resume from is in the format of
torch.distributed.checkpoint (DCP): every rank writes its own part, and the number of ranks may change before a resume. Rank
0 writes a model for users as safetensors, and gathers one file at a time. Under `none` and `ddp`, rank 0 writes the model.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_roc import checkpoint, config
from grpo_roc.checkpoint import CheckpointError, State, untied
from grpo_roc.distributed import Ranks
from grpo_roc.model import checkpoint_layers, load_model

_WEIGHTS, _OPTIMIZER = "shards", "optimizer_shards"


def find_latest(out: Path, ranks: Ranks) -> Path | None:
    """The checkpoint to resume from. Collective: only rank 0 repairs what a crash left."""
    return ranks.broadcast(checkpoint.latest(out / "latest") if ranks.is_main else None)


def open_model(folder: Path, settings: config.Model, ranks: Ranks) -> Any:
    """The model in `folder`, a published one or a checkpoint. Collective: every rank must call it."""
    if ranks.kind != "fsdp2":
        return load_model(folder, settings, ranks.device)
    with torch.device("meta"):  # without memory, until each rank knows its shards
        about = AutoConfig.from_pretrained(str(folder))
        model = AutoModelForCausalLM.from_config(about, dtype=torch.float32, attn_implementation=settings.attn)
    if settings.grad_ckpt:
        checkpoint_layers(model)
    ranks.shard(model).to_empty(device=ranks.device.torch)
    for module in model.modules():
        if module._non_persistent_buffers_set:  # computed from the configuration and not in the files
            model._init_weights(module)
    shards = folder / _WEIGHTS
    if not shards.is_dir() and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no safetensors; fsdp2 reads no other format")
    reader = dcp.FileSystemReader(shards) if shards.is_dir() else HuggingFaceStorageReader(str(folder))
    dcp.load(untied(model.state_dict(), about), storage_reader=reader, process_group=ranks.control)
    return model


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Continue with the optimizer of the checkpoint. Collective."""
    if ranks.kind != "fsdp2":
        optimizer.load_state_dict(checkpoint.load_optimizer(folder))
    elif (folder / _OPTIMIZER).is_dir():  # else it had taken no step
        state = states.get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder / _OPTIMIZER, process_group=ranks.control)
        states.set_optimizer_state_dict(model, optimizer, state)


def save(
    folder: Path,
    ranks: Ranks,
    model: Any,
    optimizer: torch.optim.Optimizer | None,  # None: a model for users, from which no run resumes
    tokenizer: Any,
    state: State,
    settings: config.Config,
    rollouts: bytes = b"",  # that wait for their update; only rank 0 has them
) -> None:
    """Write a folder that is complete or absent. Collective; returns on every rank when the folder is there.

    The other ranks wait in the control group: writing may take longer than the time-out for collectives of gradients.
    """
    fresh = checkpoint.temporary(folder)
    if ranks.is_main:
        checkpoint.begin(fresh)
    ranks.barrier()
    if ranks.kind == "fsdp2":
        _write_shards(fresh, ranks, model, optimizer)
    elif ranks.is_main:
        checkpoint.save_weights(untied(model.state_dict(), model.config), fresh)
        if optimizer is not None:
            checkpoint.save_optimizer(optimizer.state_dict(), fresh)
    ranks.barrier()
    if ranks.is_main:
        checkpoint.save_rollouts(rollouts, fresh)
        checkpoint.finish(fresh, folder, model.config, tokenizer, state, settings)
    ranks.barrier()


def _write_shards(fresh: Path, ranks: Ranks, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
    weights = untied(model.state_dict(), model.config)
    if optimizer is None:
        checkpoint.save_weights(weights, fresh if ranks.is_main else None)
        return
    dcp.save(weights, checkpoint_id=fresh / _WEIGHTS, process_group=ranks.control)
    if optimizer.state:
        state = states.get_optimizer_state_dict(model, optimizer)
        dcp.save(state, checkpoint_id=fresh / _OPTIMIZER, process_group=ranks.control)
