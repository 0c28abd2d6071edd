"""The protocol of an engine: tokens in, tokens out.

All turns of a rollout have one `request_id`, so that the engine can keep its KV cache between them until `release`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from grpo_roc.engines.weights import Weights


class EngineError(Exception):
    """An engine refused a request or returned something unexpected: the same request would fail again."""


class EngineUnavailable(EngineError):
    """An engine cannot be reached, answered 5xx, or has wrong weights: another one can answer, or this one later."""


class Sampling(NamedTuple):
    max_new: int
    temperature: float = 1.0
    stop: tuple[int, ...] = ()
    seed: tuple[int, ...] = (0,)  # a rollout's sample does not depend on the rest of the batch; empty: any sample


class Generated(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    finish: str  # "stop" or "length"
    weight_version: int = 0
    preempted: int = 0  # how often its cache was dropped during the turn
    entropies: Sequence[float] = ()  # in nats; empty: the engine does not report them


class Load(NamedTuple):
    capacity: int  # tokens of KV cache
    used: int
    running: int
    waiting: int
    preempted: int  # since the start
    block: int = 0  # tokens are cached in blocks of so many, which requests with a common prefix share; 0: nothing is shared


class Engine(Protocol):
    name: str
    direct: bool  # it gets weights over the network or GPU memory, also when it is back after a loss

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated: ...
    async def release(self, request_id: str) -> None: ...
    async def load(self) -> Load: ...
    async def update_weights(self, weights: Weights) -> None: ...
    async def sleep(self) -> None:
        """Free the GPU's memory until the next `update_weights`."""
        ...

    async def check(self) -> None:
        """Raise EngineUnavailable if it does not answer, or has other weights than `update_weights` gave it."""
        ...

    async def aclose(self) -> None: ...
