"""The protocol of a rollout engine: tokens in, tokens out.

All turns of a rollout carry one `request_id`, so that an engine may keep its KV cache between them; `release` ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class EngineError(Exception):
    """An engine did not do what its documentation says, or was not there."""


class Sampling(NamedTuple):
    max_new: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    seed: tuple[int, ...] = (0,)  # a rollout's randomness is its own: it does not depend on what else is in the batch


class Generated(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    finish: str  # "stop" or "length"
    entropies: list[float] = []  # nats, local engine only
    weight_version: int = 0
    preempted: int = 0  # how often its cache was dropped on the way


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
