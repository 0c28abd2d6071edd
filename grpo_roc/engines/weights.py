"""The weights of one policy, for all engines: tensors for a local one, one folder of files for those behind HTTP."""

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_roc.checkpoint import save_weights

# In memory if possible: the engines read the files right after they are written.
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class Weights:
    """`label` is unique, also after a resume: an engine that reports it has these weights and no others."""

    def __init__(self, tensors: Mapping[str, Any], version: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensors, self.version, self.dtype = tensors, version, dtype
        self.label = f"{version}-{secrets.token_hex(4)}"
        self._folder = SHARED / f"grpo-roc-{os.getpid()}-{self.label}"
        self._writing = asyncio.Lock()
        self._discarded = False

    async def folder(self) -> Path:
        """Write the files once; every engine must share this file system. FileNotFoundError: the weights were discarded."""
        async with self._writing:
            if self._discarded:
                raise FileNotFoundError(f"the weights {self.label} were replaced by newer ones")
            if not self._folder.exists():
                await asyncio.to_thread(self._write)
        return self._folder

    def items(self, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """One by one, as they go to an engine."""
        for name, tensor in self.tensors.items():
            yield name, tensor.detach().to(device, self.dtype).contiguous()

    def _write(self) -> None:
        fresh = self._folder.with_suffix(".new")
        fresh.mkdir(mode=0o700, exist_ok=True)
        save_weights(self.tensors, fresh, self.dtype)
        fresh.rename(self._folder)

    def keep_files_only(self) -> None:
        """Free the tensors' memory, if there are files."""
        if self._folder.exists():
            self.tensors = {}

    def keep_copy(self) -> None:
        """In main memory: the next training step changes the tensors."""
        self.tensors = {name: tensor.detach().to("cpu", self.dtype, copy=True) for name, tensor in self.tensors.items()}

    def discard(self) -> None:
        self._discarded = True
        shutil.rmtree(self._folder, ignore_errors=True)
