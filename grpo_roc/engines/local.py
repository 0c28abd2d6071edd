"""Continuous batching in this process, over a KV cache that really holds `capacity` tokens and no more.

A step reads what is new (prompts, tool answers, and after an eviction everything again) and samples one token for every running
request. A request keeps its cache between its turns until `release`. When there is no room for the next tokens, requests are
evicted: their places go to others, and what they had is computed anew later. Both are counted where they happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.engines.base import EngineError, Generated, Load, Sampling
from grpo_roc.engines.decoder import Decoder


class _Request:
    """One rollout. `places[i]` is where token i lies in the pool; tokens from `len(places)` on are not there (any more)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ids: list[int] = []
        self.places: list[int] = []
        self.computed = 0  # tokens that were in the cache at some time
        self.new: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self.preempted = 0
        self.sampling = Sampling(1)
        self.uniforms: Sequence[float] = ()
        self.done: asyncio.Future[Generated] | None = None
        self.result: Generated | None = None


class LocalEngine:
    def __init__(self, model_config: Any, weights: Mapping[str, Tensor], settings: config.Engine, name: str = "local") -> None:
        self.name = name
        self.settings = settings
        self._decoder = Decoder(model_config, weights, settings.capacity)
        self._free = list(range(settings.capacity - 1, -1, -1))
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._requests: dict[str, _Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self.version = 0
        self.steps = 0
        self.evictions = 0
        self.read_tokens = 0  # by the forward pass
        self.recomputed_tokens = 0  # of these, read before and evicted

    # -- the protocol -----------------------------------------------------------------------------------------------------

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

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.put_weights(weights, version)

    async def aclose(self) -> None:
        if self._driver is not None:
            self._driver.cancel()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    # -- the same without an event loop -----------------------------------------------------------------------------------

    def generate_all(self, asked: Sequence[tuple[str, list[int], Sampling]]) -> list[Generated]:
        """All of them, in a batch whose make-up depends on nothing but the arguments: the same floats every time."""
        requests = [self.submit(*one) for one in asked]
        while not all(request.result for request in requests):
            self.step()
        return [request.result for request in requests if request.result]

    def put_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Everything cached was computed with the old ones: it is dropped."""
        for request in self._requests.values():
            self._give_back(request)
            request.computed = 0
        self._waiting = [*self._running, *self._waiting]
        self._running = []
        self._decoder.put_weights(weights)
        self.version = version

    def submit(self, request_id: str, ids: list[int], sampling: Sampling) -> _Request:
        longest = min(self.settings.max_len, self.settings.capacity)
        if len(ids) + sampling.max_new > longest:
            raise EngineError(f"{len(ids)} + {sampling.max_new} tokens are more than the {longest} that this engine can hold")
        request = self._requests.setdefault(request_id, _Request(request_id))
        if ids[: len(request.ids)] != request.ids:
            raise EngineError(f"request {request_id} does not go on where it was")
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
            self._give_back(request)
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
            raise EngineError("nothing fits: requests between turns hold the whole cache")
        self.steps += 1
        sampled: list[tuple[_Request, tuple[int, float, float]]] = []
        for part in self._parts():
            sampled += zip(part, self._read(part), strict=True)
        for request, (token, logprob, entropy) in sampled:
            self._take(request, token, logprob, entropy)

    def _admit(self) -> None:
        """Those whose beginning is still cached first, then first come, first served.

        Cache of rollouts that wait for a tool makes way for a request that cannot be admitted otherwise, the oldest first, as
        in an engine with a prefix cache.
        """
        room = len(self._free) - sum(self._headroom(request) for request in self._running)
        budget = self.settings.prefill_tokens
        for request in sorted(self._waiting, key=lambda request: not request.places):
            missing = len(request.ids) - len(request.places)
            over_budget = missing > budget < self.settings.prefill_tokens  # a whole budget serves the longest one, too
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

    def _headroom(self, request: _Request) -> int:
        """Without any, what was evicted comes back at once and is evicted again."""
        return min(self.settings.headroom, request.sampling.max_new - len(request.new))

    def _clear_idle(self, wanted: int) -> int:
        """Evict rollouts between turns until `wanted` places are free; how many were won."""
        if wanted <= 0:
            return 0
        active = {request.name for request in (*self._waiting, *self._running)}
        won = 0
        for request in self._requests.values():
            if request.places and request.name not in active:
                won += len(request.places)
                self._evict(request)
                if won >= wanted:
                    break
        return won

    def _clear_queue(self) -> None:
        """Nobody runs, and what waits holds the cache: the first one gets what the last ones have."""
        first = self._waiting.pop(0)
        for request in reversed(self._waiting):
            if len(first.ids) - len(first.places) <= len(self._free):
                break
            if request.places:
                self._evict(request)
        self._running.append(first)

    def _make_room(self) -> None:
        needed = sum(len(request.ids) - len(request.places) for request in self._running)
        while needed > len(self._free) and len(self._running) > 1:
            count = len(self._running) // 2 if self.settings.overflow == "evict_half" else 1
            for request in self._running[-count:]:
                self._evict(request)
            self._waiting = self._running[-count:] + self._waiting
            self._running = self._running[:-count]
            needed = sum(len(request.ids) - len(request.places) for request in self._running)
        while needed > len(self._free):
            idle = [request for request in self._requests.values() if request.places and request not in self._running]
            if not idle:
                raise EngineError("one request alone is larger than the cache")
            self._evict(idle[-1])

    def _evict(self, request: _Request) -> None:
        self._give_back(request)
        request.preempted += 1
        self.evictions += 1

    def _give_back(self, request: _Request) -> None:
        self._free += request.places
        request.places = []

    def _parts(self) -> list[list[_Request]]:
        """Those that read one token, and those that read many: apart, so that the first are not padded to the second."""
        one = [request for request in self._running if len(request.ids) - len(request.places) == 1]
        many = [request for request in self._running if len(request.ids) - len(request.places) > 1]
        if many and not self.settings.mixed:
            return [many]
        return [part for part in (one, many) if part]

    def _read(self, requests: list[_Request]) -> list[tuple[int, float, float]]:
        """Read what is new of each and sample: token, log-probability, entropy."""
        counts = [len(request.ids) - len(request.places) for request in requests]
        longest, widest = max(counts), max(len(request.ids) for request in requests)
        tokens: Any = np.zeros((len(requests), longest), np.int64)
        positions = np.zeros_like(tokens)
        places = np.full_like(tokens, self.settings.capacity)
        context: Any = np.full((len(requests), widest), self.settings.capacity, np.int64)
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            first = len(request.places)
            request.places += [self._free.pop() for _ in range(count)]
            tokens[row, :count] = request.ids[first:]
            positions[row, :count] = range(first, first + count)
            places[row, :count] = request.places[first:]
            context[row, : len(request.places)] = request.places
            self.recomputed_tokens += max(0, min(request.computed, first + count) - first)
            request.computed = max(request.computed, first + count)
        self.read_tokens += sum(counts)
        last = torch.tensor(counts) - 1
        arrays = (torch.from_numpy(array) for array in (tokens, positions, places, context))
        logits = self._decoder(*arrays, last)
        return _sample(logits, requests)

    def _take(self, request: _Request, token: int, logprob: float, entropy: float) -> None:
        request.ids.append(token)
        request.new.append(token)
        request.logprobs.append(logprob)
        request.entropies.append(entropy)
        stopped = token in request.sampling.stop
        if stopped or len(request.new) >= request.sampling.max_new:
            self._running.remove(request)
            self._finish(request, "stop" if stopped else "length")

    def _finish(self, request: _Request, finish: str) -> None:
        request.result = Generated(request.new, request.logprobs, finish, request.entropies, self.version, request.preempted)
        if request.done is not None and not request.done.done():
            request.done.set_result(request.result)


def _sample(logits: Tensor, requests: list[_Request]) -> list[tuple[int, float, float]]:
    """By inversion: one uniform number decides, so a rollout's luck is its own."""
    temperature = torch.tensor([[max(request.sampling.temperature, 1e-4)] for request in requests])
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    probabilities = logprobs.exp()
    totals = probabilities.cumsum(-1)
    uniforms = torch.tensor([[request.uniforms[len(request.new)]] for request in requests])
    tokens = torch.searchsorted(totals, uniforms * totals[:, -1:]).clamp(max=logits.shape[1] - 1)
    chosen = logprobs.gather(1, tokens)[:, 0].tolist()
    entropies = (-(probabilities * logprobs).sum(-1)).tolist()
    return list(zip(tokens[:, 0].tolist(), chosen, entropies, strict=True))
