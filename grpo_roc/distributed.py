"""Devices and ranks: several processes train one model; rank 0 makes the rollouts.

`ddp` keeps the whole model on every rank and sums gradients; `fsdp2` shards it. Every rank gets all selected rollouts and takes
its share of the micro-batches; because every rank knows the whole batch, a token has the same weight on any of them.
"""

import os
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_roc import config
from grpo_roc.checkpoint import untied
from grpo_roc.loss import register_forward

T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of gradients and weights
CONTROL_TIMEOUT = timedelta(days=7)  # the other ranks wait while rank 0 makes rollouts, evaluates or filters problems
_FULL = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Device(NamedTuple):
    kind: str  # "cpu" or "cuda"; also "cuda" in a HIP build of torch (ROCm)
    name: str
    dtype: torch.dtype
    backend: str

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind, local_rank() if self.kind == "cuda" else 0)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {str(self.dtype).removeprefix('torch.')}, {self.backend})"


def use_device(settings: config.Config) -> Device:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return pick_device(settings.model.dtype)


def pick_device(dtype: str = "auto") -> Device:
    """A GPU with bf16 and nccl, else the CPU with fp32 and gloo."""
    if torch.cuda.is_available():
        build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        name = f"{torch.cuda.get_device_name(local_rank())}, {build}"
        return Device("cuda", name, DTYPES.get(dtype, torch.bfloat16), "nccl")  # on ROCm nccl is RCCL
    return Device("cpu", f"CPU, {torch.get_num_threads()} threads", DTYPES.get(dtype, torch.float32), "gloo")


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class Ranks:
    """The processes of a run: those of torchrun, else this one alone."""

    def __init__(self, parallel: config.Parallel, device: Device) -> None:
        self.kind, self.device = parallel.kind, device
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.world > 1 and self.kind == "none":
            raise config.ConfigError("WORLD_SIZE is more than 1: set parallel.kind=ddp or fsdp2")
        if device.kind == "cuda":
            torch.cuda.set_device(local_rank())
        if self.kind != "none" and not dist.is_initialized():
            dist.init_process_group(device.backend, timeout=COLLECTIVE_TIMEOUT)
        # gloo: a waiting nccl collective would keep the GPU busy. A dead rank is noticed by its connection and not by the time.
        self._control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if self.kind != "none" else None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def control(self) -> Any:
        """The process group in which ranks may wait for hours."""
        return self._control

    def barrier(self) -> None:
        if self._control is not None:
            dist.barrier(self._control)

    def share(self, parts: list[T]) -> list[tuple[T, float]]:
        """This rank's parts with weight 1, and with weight 0 one that fills up: passes of a sharded model are collective."""
        filled = [(part, 1.0) for part in parts] + [(parts[0], 0.0)] * (-len(parts) % self.world)
        return filled[self.rank :: self.world]

    def shard(self, model: Any) -> Any:
        if self.kind == "fsdp2":
            # Each rank keeps its shard of parameters and Adam's moments in fp32 and computes in the device's dtype.
            policy = MixedPrecisionPolicy(param_dtype=self.device.dtype, reduce_dtype=torch.float32)
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            register_forward(model)
        return model

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.kind == "none":
            return value  # type: ignore[return-value]
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on rank 0; elsewhere nothing."""
        if self.kind == "none":
            return [value]
        found: list[Any] | None = [None] * self.world if self.is_main else None
        dist.gather_object(value, found, dst=0, group=self._control)
        return found or []

    @property
    def loss_scale(self) -> float:
        """FSDP averages gradients over ranks, but each rank's loss is already its part of a global sum."""
        return float(self.world) if self.kind == "fsdp2" else 1.0

    def apply_gradients(self, model: Any, optimizer: torch.optim.Optimizer, clip: float) -> float:
        """Sum the ranks' gradients, clip them, and take an optimizer step; returns the norm before the clip."""
        self._sum_gradients(model)
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _sum_gradients(self, model: Any) -> None:
        if self.kind == "ddp":
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def sum(self, values: list[float]) -> list[float]:
        if self.kind == "none":
            return values
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return value if self.kind == "none" else self._reduce([value], dist.ReduceOp.MAX)[0]

    def _reduce(self, values: list[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64 if self.device.kind == "cpu" else torch.float32)
        tensor = tensor.to(self.device.torch)
        dist.all_reduce(tensor, how)
        return [float(value) for value in tensor]

    def gather_weights(self, model: Any) -> dict[str, torch.Tensor]:
        """The whole model's weights. Collective: every rank must call it."""
        whole = sharded.get_model_state_dict(model, options=_FULL) if self.kind == "fsdp2" else model.state_dict()
        return untied(whole, model.config)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
