"""Shared by the HTTP engines: requests, weights as files, Prometheus metrics."""

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

from grpo_roc.checkpoint import save_weights
from grpo_roc.engines.base import EngineError, Generated

T = TypeVar("T")
# In memory if possible: the engine reads the file right after it is written.
SHARED = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


class HttpEngine:
    def __init__(self, url: str) -> None:
        self.name = url
        self.version = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(base_url=url, timeout=3600.0, limits=limits, trust_env=False)
        self._folder: Path | None = None

    async def aclose(self) -> None:
        await self._http.aclose()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def request(self, method: str, path: str, kind: type[T], **fields: Any) -> T:
        answer = await self._send(method, path, **fields)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineError(f"{self.name}{path} returned an unexpected body: {error}") from error

    async def _send(self, method: str, path: str, **fields: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **fields)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.name}{path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise EngineError(f"{self.name}{path} returned {answer.status_code}: {answer.text[:500]}")
        return answer

    def generated(self, request_id: str, ids: list[int], logprobs: list[float], finish: str) -> Generated:
        if finish not in ("stop", "length"):
            raise EngineError(f"{self.name}: {request_id} ended with {finish}")
        return Generated(ids, logprobs, finish, weight_version=self.version)

    async def release(self, request_id: str) -> None:
        """Nothing to do: the servers' prefix caches evict unused entries."""

    async def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        return read_prometheus((await self._send("GET", "/metrics")).text)

    async def write_weights(self, weights: Mapping[str, Any], version: int) -> Path:
        """Write the weights to a new folder and remove the previous one. The engine must share the file system."""
        folder = SHARED / f"grpo-roc-{os.getpid()}-{zlib.crc32(self.name.encode()):08x}-{version}"
        folder.mkdir(mode=0o700, exist_ok=True)
        await asyncio.to_thread(save_weights, weights, folder)
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
    """The sum over all engines behind one address."""
    values = [value for found, _, value in metrics if found == name]
    if not values:
        raise EngineError(f"metric {name} not found")
    return sum(values)


def hash_seed(parts: tuple[int, ...]) -> int:
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
