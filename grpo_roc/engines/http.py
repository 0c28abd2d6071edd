"""What the HTTP engines share: requests that fail with words, weights that travel as files, Prometheus text."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from grpo_roc.engines.base import EngineError

T = TypeVar("T")
# In memory where that is possible: the engine reads what the trainer wrote a moment ago.
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class HttpEngine:
    def __init__(self, url: str, *, timeout_s: float = 3600.0, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.name = url
        self.version = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, transport=transport, trust_env=False)
        self._folder: Path | None = None

    async def aclose(self) -> None:
        await self._http.aclose()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def ask(self, method: str, path: str, kind: type[T], **fields: Any) -> T:
        answer = await self._send(method, path, **fields)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineError(f"{self.name}{path} answered what its documentation does not have: {error}") from error

    async def _send(self, method: str, path: str, **fields: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **fields)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.name}{path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise EngineError(f"{self.name}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer

    async def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        return read_prometheus((await self._send("GET", "/metrics")).text)

    async def write_weights(self, weights: Mapping[str, Any], version: int) -> Path:
        """A folder with the weights; the one before is removed. The engine must see the same file system."""
        from safetensors.torch import save_file

        folder = SHARED / f"grpo-roc-{os.getpid()}-{zlib.crc32(self.name.encode()):08x}-{version}"
        folder.mkdir(mode=0o700, exist_ok=True)
        whole = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        await asyncio.to_thread(save_file, whole, folder / "model.safetensors", {"format": "pt"})
        if self._folder is not None and self._folder != folder:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
        self._folder = folder
        return folder


_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_prometheus(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def total(metrics: list[tuple[str, dict[str, str], float]], name: str) -> float:
    """Over all engines behind one address; an error if there is no such metric."""
    values = [value for found, _, value in metrics if found == name]
    if not values:
        raise EngineError(f"there is no metric {name}")
    return sum(values)


def seed_of(parts: tuple[int, ...]) -> int:
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
