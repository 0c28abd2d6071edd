"""Continuous batching in this process, over a KV cache of exactly `capacity` tokens.

A step reads the new tokens of every running request (prompt, observation, or all tokens after an eviction) and samples one
token for each. A request keeps its cache between turns until `release`. When the cache is full, requests are evicted and
recomputed later; the engine counts evictions and recomputed tokens.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.decoder import Decoder
from grpo_roc.engines.weights import Weights

HEADROOM = 16  # tokens kept free per running request when another is admitted


class Sampled(NamedTuple):
    token: int
    logprob: float
    entropy: float  # in nats


class Request:
    """One rollout. `cells[i]` is the cache cell of token i; tokens from `len(cells)` on are not cached."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ids: list[int] = []
        self.cells: list[int] = []
        self.computed = 0  # tokens that were cached at some time
        self.new: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self.preempted = 0
        self.sampling = Sampling(1)
        self.uniforms: Sequence[float] = ()
        self.done: asyncio.Future[Generated] | None = None
        self.result: Generated | None = None


class LocalEngine:
    direct = False  # it is never lost

    def __init__(self, model_config: Any, weights: Mapping[str, Tensor], settings: config.Engine, name: str = "local") -> None:
        self.name = name
        self.settings = settings
        self._decoder = Decoder(model_config, weights, settings.capacity, settings.linear)
        self._free = list(range(settings.capacity - 1, -1, -1))
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self.version = 0
        self.steps = 0
        self.evictions = 0
        self.read_tokens = 0  # input of forward passes
        self.recomputed_tokens = 0  # of these, cached before and evicted

    # -- the engine protocol ----------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        request = self.submit(request_id, ids, sampling)
        request.done = asyncio.get_running_loop().create_future()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await request.done

    async def release(self, request_id: str) -> None:
        self.drop(request_id)

    async def load(self) -> Load:
        used = self.settings.capacity - len(self._free)
        return Load(self.settings.capacity, used, len(self._running), len(self._waiting), self.evictions)

    async def aclose(self) -> None:
        if self._driver is not None:
            self._driver.cancel()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    # -- the same without an event loop -----------------------------------------------------------------------------------

    def generate_all(self, turns: Sequence[tuple[str, list[int], Sampling]]) -> list[Generated]:
        """Generate all of them in batches that depend on the arguments alone: the same floats every time."""
        requests = [self.submit(*one) for one in turns]
        while not all(request.result for request in requests):
            self.step()
        return [request.result for request in requests if request.result]

    async def sleep(self) -> None:
        """It has no memory of a GPU."""

    async def check(self) -> None:
        """It has the weights that it was given."""

    async def update_weights(self, weights: Weights) -> None:
        """Replace the weights and drop the cache, which was computed with the old ones."""
        for request in self._requests.values():
            self._free_cells(request)
            request.computed = 0
        self._waiting = [*self._running, *self._waiting]
        self._running = []
        self._decoder.put_weights(weights.tensors)
        self.version = weights.version

    def submit(self, request_id: str, ids: list[int], sampling: Sampling) -> Request:
        longest = min(self.settings.max_len, self.settings.capacity)
        if len(ids) + sampling.max_new > longest:
            raise EngineError(f"{len(ids)} + {sampling.max_new} tokens are more than the {longest} that this engine holds")
        request = self._requests.setdefault(request_id, Request(request_id))
        if ids[: len(request.ids)] != request.ids:
            raise EngineError(f"request {request_id} does not continue its earlier tokens")
        request.ids = list(ids)
        request.new, request.logprobs, request.entropies, request.preempted = [], [], [], 0
        request.sampling, request.result = sampling, None
        seed = np.random.SeedSequence([part & 0xFFFFFFFF for part in sampling.seed])
        request.uniforms = np.random.Generator(np.random.Philox(seed)).random(sampling.max_new).tolist()
        self._waiting.append(request)
        return request

    def drop(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free_cells(request)
            self._waiting = [other for other in self._waiting if other is not request]
            self._running = [other for other in self._running if other is not request]

    # -- one step ---------------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        while self.busy:
            try:
                self.step()
            except Exception as error:
                self._fail(error)
            await asyncio.sleep(0)

    def _fail(self, error: Exception) -> None:
        for request in [*self._running, *self._waiting]:
            if request.done is not None and not request.done.done():
                request.done.set_exception(error)
        self._running, self._waiting = [], []

    def step(self) -> None:
        self._admit()
        self._make_room()
        if not self._running:
            raise EngineError("no request fits: requests between turns hold the whole cache")
        self.steps += 1
        sampled: list[tuple[Request, Sampled]] = []
        for part in self._parts():
            sampled += zip(part, self._read(part), strict=True)
        for request, one in sampled:
            self._append(request, one)

    def _admit(self) -> None:
        """Requests with a cached prefix first, then first come, first served.

        A request that does not fit evicts rollouts that wait for a tool, the oldest first, like an engine with a prefix cache.
        """
        room = len(self._free) - sum(self._headroom(request) for request in self._running)
        budget = self.settings.prefill_tokens
        for request in sorted(self._waiting, key=lambda request: not request.cells):
            missing = len(request.ids) - len(request.cells)
            over_budget = missing > budget < self.settings.prefill_tokens  # an unused budget admits a request of any length
            if len(self._running) >= self.settings.slots or over_budget:
                break
            room += self._clear_idle(missing + self._headroom(request) - room)
            if missing + self._headroom(request) > room:
                break
            room, budget = room - missing - self._headroom(request), budget - missing
            self._waiting.remove(request)
            self._running.append(request)
        if not self._running and self._waiting:
            self._clear_queue()

    def _headroom(self, request: Request) -> int:
        """Without headroom, an evicted request returns at once and is evicted again."""
        return min(HEADROOM, request.sampling.max_new - len(request.new))

    def _clear_idle(self, wanted: int) -> int:
        """Evict rollouts between turns until `wanted` cells are free; returns the number of freed cells."""
        if wanted <= 0:
            return 0
        active = {request.name for request in (*self._waiting, *self._running)}
        freed = 0
        for request in self._requests.values():
            if request.cells and request.name not in active:
                freed += len(request.cells)
                self._evict(request)
                if freed >= wanted:
                    break
        return freed

    def _clear_queue(self) -> None:
        """No request runs, and waiting ones hold the cache: evict the last until the first fits."""
        first = self._waiting.pop(0)
        for request in reversed(self._waiting):
            if len(first.ids) - len(first.cells) <= len(self._free):
                break
            if request.cells:
                self._evict(request)
        self._running.append(first)

    def _make_room(self) -> None:
        needed = sum(len(request.ids) - len(request.cells) for request in self._running)
        while needed > len(self._free) and len(self._running) > 1:
            count = len(self._running) // 2
            for request in self._running[-count:]:
                self._evict(request)
            self._waiting = self._running[-count:] + self._waiting
            self._running = self._running[:-count]
            needed = sum(len(request.ids) - len(request.cells) for request in self._running)
        while needed > len(self._free):
            idle = [request for request in self._requests.values() if request.cells and request not in self._running]
            if not idle:
                raise EngineError("a single request is larger than the cache")
            self._evict(idle[-1])

    def _evict(self, request: Request) -> None:
        self._free_cells(request)
        request.preempted += 1
        self.evictions += 1

    def _free_cells(self, request: Request) -> None:
        self._free += request.cells
        request.cells = []

    def _parts(self) -> list[list[Request]]:
        """Decoding requests (one new token) and prefilling ones in separate batches, which saves padding."""
        one = [request for request in self._running if len(request.ids) - len(request.cells) == 1]
        many = [request for request in self._running if len(request.ids) - len(request.cells) > 1]
        return [part for part in (one, many) if part]

    def _read(self, requests: list[Request]) -> list[Sampled]:
        """Read the new tokens of each request and sample the next one."""
        starts = [len(request.cells) for request in requests]
        counts = [len(request.ids) - first for request, first in zip(requests, starts, strict=True)]
        for request, first, count in zip(requests, starts, counts, strict=True):
            request.cells += [self._free.pop() for _ in range(count)]
            self.recomputed_tokens += max(0, min(request.computed, first + count) - first)
            request.computed = max(request.computed, first + count)
        self.read_tokens += sum(counts)
        if max(counts) == 1:
            tokens = torch.tensor([request.ids[-1:] for request in requests])
            return _sample(self._decoder.decode(tokens, [request.cells for request in requests]), requests)
        return _sample(self._prefill(requests, starts, counts), requests)

    def _prefill(self, requests: list[Request], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        tokens: Any = np.zeros((len(requests), max(counts)), np.int64)
        positions = np.zeros_like(tokens)
        cells = np.full_like(tokens, self.settings.capacity)
        context: Any = np.full((len(requests), max(len(request.ids) for request in requests)), self.settings.capacity, np.int64)
        for row, (request, first, count) in enumerate(zip(requests, starts, counts, strict=True)):
            tokens[row, :count] = request.ids[first:]
            positions[row, :count] = range(first, first + count)
            cells[row, :count] = request.cells[first:]
            context[row, : len(request.cells)] = request.cells
        arrays = (torch.from_numpy(array) for array in (tokens, positions, cells, context))
        return self._decoder(*arrays, torch.tensor(counts) - 1)

    def _append(self, request: Request, one: Sampled) -> None:
        request.ids.append(one.token)
        request.new.append(one.token)
        request.logprobs.append(one.logprob)
        request.entropies.append(one.entropy)
        stopped = one.token in request.sampling.stop
        if stopped or len(request.new) >= request.sampling.max_new:
            self._running.remove(request)
            finish, version = "stop" if stopped else "length", self.version
            request.result = Generated(request.new, request.logprobs, finish, version, request.preempted, request.entropies)
            if request.done is not None and not request.done.done():
                request.done.set_result(request.result)


def _sample(logits: Tensor, requests: list[Request]) -> list[Sampled]:
    """By inversion of one uniform number per token, so a sample does not depend on the rest of the batch."""
    temperature = torch.tensor([[max(request.sampling.temperature, 1e-4)] for request in requests])
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    probabilities = logprobs.exp()
    totals, entropies = probabilities.cumsum(-1), -(probabilities * logprobs).sum(-1)
    uniforms = torch.tensor([[request.uniforms[len(request.new)]] for request in requests])
    tokens = torch.searchsorted(totals, uniforms * totals[:, -1:]).clamp(max=logits.shape[1] - 1)
    chosen = logprobs.gather(1, tokens)[:, 0].tolist()
    return [Sampled(*one) for one in zip(tokens[:, 0].tolist(), chosen, entropies.tolist(), strict=True)]
