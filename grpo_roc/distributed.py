"""Several processes, one model: rank 0 makes the rollouts, all ranks learn from them.

`ddp` here means: every rank has the whole model and gradients are summed. `fsdp2` shards it. Every rank gets all selected
rollouts and takes its part of the micro-batches; since all know the whole batch, a token weighs the same wherever it is.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_roc import config
from grpo_roc.device import Device, local_rank

T = TypeVar("T")


class Team:
    """The processes of a run; alone without torchrun."""

    def __init__(self, parallel: config.Parallel, device: Device) -> None:
        self.kind, self.device = parallel.kind, device
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world > 1 and self.kind == "none":
            raise config.ConfigError("WORLD_SIZE is more than 1: say parallel.kind=ddp or fsdp2")
        if device.kind == "cuda":
            torch.cuda.set_device(local_rank())
        if self.kind != "none" and not dist.is_initialized():
            dist.init_process_group(device.backend)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wrap(self, model: Any) -> Any:
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            # Parameters and Adam's moments stay in fp32, shards of each rank; computing is in the device's type.
            policy = MixedPrecisionPolicy(param_dtype=self.device.dtype, reduce_dtype=torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        return model

    def everyone(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.kind == "none":
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    @property
    def loss_scale(self) -> float:
        """FSDP averages gradients over ranks; the loss is already a part of a global sum."""
        return float(self.world) if self.kind == "fsdp2" else 1.0

    def sum_gradients(self, model: Any) -> None:
        if self.kind == "ddp":
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def sum(self, values: list[float]) -> list[float]:
        if self.kind == "none":
            return values
        tensor = torch.tensor(values, dtype=torch.float64 if self.device.kind == "cpu" else torch.float32)
        tensor = tensor.to(self.device.torch)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        """All of them, on every rank that asks; all ranks must ask."""
        if self.kind == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return dict(model.state_dict())

    def optimizer_state(self, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self.kind == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

            return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return optimizer.state_dict()

    def load_optimizer(self, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self.kind == "fsdp2":
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

            set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
        else:
            optimizer.load_state_dict(state)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
