"""The protocol of an engine: tokens in, tokens out.

All turns of a rollout have one `request_id`, so that the engine can keep its KV cache between them until `release`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class EngineError(Exception):
    """An engine is unavailable, refused a request, or returned something unexpected."""


class Sampling(NamedTuple):
    max_new: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    seed: tuple[int, ...] = (0,)  # a rollout's sample does not depend on the rest of the batch


class Generated(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    finish: str  # "stop" or "length"
    entropies: list[float] = []  # in nats; local engine only
    weight_version: int = 0
    preempted: int = 0  # how often its cache was dropped during the turn


class Load(NamedTuple):
    capacity: int  # tokens of KV cache
    used: int
    running: int
    waiting: int
    preempted: int  # since the start


class Engine(Protocol):
    name: str

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated: ...
    async def release(self, request_id: str) -> None: ...
    async def load(self) -> Load: ...
    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None: ...
    async def aclose(self) -> None: ...
