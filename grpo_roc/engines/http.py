"""Shared by the HTTP engines: requests, the weights that an engine has, Prometheus metrics."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from grpo_roc.engines.base import EngineError, EngineUnavailable, Generated
from grpo_roc.engines.direct import Direct
from grpo_roc.engines.weights import Weights

T = TypeVar("T")
Metric = tuple[str, dict[str, str], float]
PARTS = ("weights", "kv_cache")  # of an engine's memory, in the order in which it takes them when it wakes


class HttpEngine:
    """A subclass has `generate`, `load`, and the methods below that are not implemented."""

    check_s = 30.0  # an engine that does not answer a small request for so long is unavailable

    def __init__(self, url: str, direct: Direct | None = None) -> None:
        self.name, self.direct, self._direct = url, direct is not None, direct
        self.weights: Weights | None = None  # that it should have; None: those that it was started with
        self._released: list[str] = []  # parts of its memory that it was told to free and not yet to take again
        self._labels: set[str] = set()  # of the weights that it may have, unless it has restarted
        # The servers close connections that are idle for 5 s; a request on such a one would fail.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        # Generating may take an hour. The scheduler notices by `check` when the engine hangs.
        self._http = httpx.AsyncClient(base_url=url, timeout=3600.0, limits=limits, trust_env=False)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, read: Callable[[Any], T], **fields: Any) -> T:
        """What `read` takes from the response, in which every field that it looks up must be."""
        answer = await self._send(method, path, **fields)
        try:
            return read(answer.json())
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name}{path} returned an unexpected body: {error!r}") from error

    async def _send(self, method: str, path: str, **fields: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **fields)
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.name}{path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            kind = EngineUnavailable if answer.status_code >= 500 else EngineError
            raise kind(f"{self.name}{path} returned {answer.status_code}: {answer.text[:500]}")
        return answer

    def generated(self, request_id: str, ids: list[int], logprobs: list[float], finish: str, labels: set[str]) -> Generated:
        """`labels`: of the weights that generated the tokens, as the engine reports them."""
        if finish == "abort":
            raise EngineUnavailable(f"{self.name}: {request_id} was aborted")
        if finish not in ("stop", "length"):
            raise EngineError(f"{self.name}: {request_id} ended with {finish}")
        self._compare(labels)
        return Generated(ids, logprobs, finish, weight_version=self.weights.version if self.weights else 0)

    def _compare(self, labels: set[str]) -> None:
        if self.weights is not None and labels != {self.weights.label}:
            raise EngineUnavailable(f"{self.name} has the weights {', '.join(labels)} and not {self.weights.label}")

    async def update_weights(self, weights: Weights) -> None:
        """Let the engine load the weights, and read back that it has them."""
        self.weights = weights
        folder = await self._folder(weights) if self._direct is None else Path()
        label = await self._weight_label()  # raises soon if the engine hangs; loading may take minutes
        if label not in self._labels:
            self._forget()
        self._labels |= {label, weights.label}
        self._released = await self._asleep()
        await self._take("weights")
        if self._direct is not None:
            await self._load_direct(weights, self._direct)
        else:
            await self._load_files(folder, weights.label)
        await self._take("kv_cache")
        await self.check()
        self._labels = {weights.label}

    def _forget(self) -> None:
        """The engine has restarted: it is awake, and in no group."""
        self._released = []
        if self._direct is not None:
            self._direct.forget()

    async def _take(self, part: str) -> None:
        """A failure leaves the part released, and the next attempt takes it."""
        if part in self._released:
            await self._take_memory(part)
            self._released.remove(part)

    async def sleep(self) -> None:
        """The weights are discarded too: `update_weights` brings new ones."""
        self._labels = {await self._weight_label()}
        self._released = list(PARTS)
        await self._release_memory()

    async def _asleep(self) -> list[str]:
        """The parts of its memory that are still released."""
        return self._released

    async def check(self) -> None:
        if self._released:
            raise EngineUnavailable(f"{self.name} sleeps")
        self._compare({await self._weight_label()})

    async def _folder(self, weights: Weights) -> Path:
        try:
            return await weights.folder()
        except FileNotFoundError as error:
            raise EngineUnavailable(f"{self.name} was too slow: {error}") from error

    async def _load_files(self, folder: Path, label: str) -> None:
        raise NotImplementedError

    async def _load_direct(self, weights: Weights, direct: Direct) -> None:
        raise NotImplementedError

    async def _weight_label(self) -> str:
        raise NotImplementedError

    async def _release_memory(self) -> None:
        raise NotImplementedError

    async def _take_memory(self, part: str) -> None:
        """First for the `weights`, and when they are loaded for the rest."""
        raise NotImplementedError

    async def release(self, request_id: str) -> None:
        """Nothing to do: the servers' prefix caches evict unused entries."""

    async def metrics(self) -> list[Metric]:
        return read_prometheus((await self._send("GET", "/metrics", timeout=self.check_s)).text)


_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_prometheus(text: str) -> list[Metric]:
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
    return found


def total(metrics: list[Metric], name: str) -> float:
    """The sum over all engines behind one address."""
    values = [value for found, _, value in metrics if found == name]
    if not values:
        raise EngineError(f"metric {name} not found")
    return sum(values)


def hash_seed(parts: tuple[int, ...]) -> int:
    return zlib.crc32(repr(parts).encode()) & 0x7FFFFFFF
