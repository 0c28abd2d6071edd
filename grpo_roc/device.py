"""Where tensors live: CPU with fp32 and gloo, or a GPU with bf16 and nccl. ROCm is the same `torch.cuda` path."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class Device(NamedTuple):
    kind: str  # "cpu" or "cuda"; a HIP build of torch says "cuda" too
    name: str
    dtype: torch.dtype
    backend: str

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind, local_rank() if self.kind == "cuda" else 0)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {str(self.dtype).removeprefix('torch.')}, {self.backend})"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pick(dtype: str = "auto") -> Device:
    if torch.cuda.is_available():
        made_by = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        name = f"{torch.cuda.get_device_name(local_rank())}, {made_by}"
        return Device("cuda", name, DTYPES.get(dtype, torch.bfloat16), "nccl")  # on ROCm nccl is RCCL
    return Device("cpu", f"CPU, {torch.get_num_threads()} threads", DTYPES.get(dtype, torch.float32), "gloo")


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
