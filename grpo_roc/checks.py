"""The checks of `doctor --full`: engines against the trainer, speed against the roofline, memory against the forecast."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_roc import collectives, config
from grpo_roc.batches import Sample
from grpo_roc.checkpoint import untied
from grpo_roc.distributed import Device, Ranks, pick_device
from grpo_roc.engines import make_engines
from grpo_roc.engines.base import Engine, Generated, Sampling
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.weights import Weights
from grpo_roc.forecast import device_memory, forecast, gigabytes, measured_peak, tensors_of
from grpo_roc.learner import Learner
from grpo_roc.loss import logprobs
from grpo_roc.model import checkpoint_layers, load_model, load_tokenizer
from grpo_roc.rollout import Codec

PROBLEMS = ("What is 512*731%999?", "Compute 17*23.", "Name a prime number above 100.", "What is the sum of 1, 2 and 3?")
# Mean and largest |Δ log p| of a token. The local engine computes in fp32 like the trainer here; servers compute in bf16, where
# 0.05 and 0.3 were measured with SmolLM2-135M, and 2 and 8 with wrong weights.
TOLERANCES = {"local": (1e-3, 1e-2), "server": (0.08, 1.0)}
MEMORY_TOLERANCE = 0.25
TOKENS = {"cuda": 4096, "cpu": 256}  # of the update whose memory is measured
PUBLISHED = {"MI300X": 5.3e12, "MI325X": 6.0e12, "MI250": 1.6e12, "H100": 3.35e12, "A100": 2.0e12}  # bytes/s of one device


class Skip(Exception):
    """A check does not apply here; the message says why."""


class Setup:
    """The settings, the model's folder, and the model once it is needed."""

    def __init__(self, settings: config.Config, folder: Path, ranks: int) -> None:
        self.settings, self.folder, self.ranks = settings, folder, ranks
        self.device: Device = pick_device(settings.model.dtype)
        self._version = 0

    @cached_property
    def model_config(self) -> Any:
        if not (self.folder / "config.json").is_file():
            raise Skip(f"no model in {self.folder}")
        return AutoConfig.from_pretrained(str(self.folder))

    @cached_property
    def model(self) -> Any:
        assert self.model_config
        return load_model(self.folder, self.settings.model, self.device).eval()

    @cached_property
    def codec(self) -> Codec:
        return Codec(load_tokenizer(self.folder), self.settings.chat)

    def weights(self) -> Weights:
        self._version += 1
        return Weights(untied(self.model.state_dict(), self.model.config), self._version)

    async def each_engine(self, check: Callable[["Setup", Engine], Awaitable[str]]) -> str:
        local = any(engine.kind == "local" for engine in self.settings.engines)  # others have weights from their start
        engines = make_engines(self.settings, self.folder, self.weights().tensors if local else {})
        try:
            return "; ".join([f"{engine.name}: {await check(self, engine)}" for engine in engines])
        finally:
            for engine in engines:
                await engine.aclose()

    async def push(self, engine: Engine) -> None:
        """Send the model's weights to the engine, and check that it reports their label."""
        weights = self.weights()
        try:
            await engine.update_weights(weights)
            await engine.check()
        finally:
            weights.discard()


async def generate(
    setup: Setup, engine: Engine, count: int = len(PROBLEMS), tokens: int = 32
) -> list[tuple[list[int], Generated]]:
    prompts = [setup.codec.prompt(PROBLEMS[number % len(PROBLEMS)]) for number in range(count)]

    async def one(number: int, ids: list[int]) -> Generated:
        name = f"doctor-{time.monotonic_ns()}-{number}"
        try:
            return await engine.generate(name, ids, Sampling(tokens, 1.0, setup.codec.stop, (number,)))
        finally:
            await engine.release(name)

    return list(zip(prompts, await asyncio.gather(*(one(*asked) for asked in enumerate(prompts))), strict=True))


def compare(setup: Setup, engine: Engine, generated: list[tuple[list[int], Generated]]) -> str:
    """Mean and largest difference of the tokens' log-probabilities from the trainer's.

    Raises:
        RuntimeError: they differ by more than the dtypes explain.
    """
    found = []
    for prompt, one in generated:
        ids = torch.tensor([prompt + one.ids], device=setup.device.torch)
        mask = torch.tensor([[0] * len(prompt) + [1] * len(one.ids)], device=setup.device.torch)
        with torch.no_grad():
            trainer = logprobs(setup.model, ids, mask)[0, len(prompt) - 1 :].cpu()
        found.append((trainer - torch.tensor(one.logprobs)).abs())
    differences = torch.cat(found)
    mean, largest = float(differences.mean()), float(differences.max())
    text = f"|Δ log p| mean {mean:.1e}, largest {largest:.1e} over {len(differences)} tokens"
    limits = TOLERANCES["local" if isinstance(engine, LocalEngine) else "server"]
    if not (mean <= limits[0] and largest <= limits[1]):
        raise RuntimeError(
            f"{text}; at most {limits[0]} and {limits[1]} are expected: engine and trainer compute different models"
        )
    return text


async def parity(setup: Setup, engine: Engine) -> str:
    """The engine's log-probabilities are the trainer's."""
    await setup.push(engine)
    return compare(setup, engine, await generate(setup, engine))


async def round_trip(setup: Setup, engine: Engine) -> str:
    """New weights arrive and change the output, and the old ones come back."""
    await setup.push(engine)
    before = await generate(setup, engine)
    with _changed(setup.model):
        await setup.push(engine)
        after = await generate(setup, engine)
        changed = compare(setup, engine, after)
    await setup.push(engine)
    compare(setup, engine, await generate(setup, engine))
    if [one.logprobs for _, one in before] == [one.logprobs for _, one in after]:
        raise RuntimeError("the output did not change with the weights")
    return f"the output changed with the weights ({changed}) and back"


@contextlib.contextmanager
def _changed(model: Any) -> Iterator[None]:
    """Halving and doubling are exact in every dtype."""
    _scale(model, 0.5)
    try:
        yield
    finally:
        _scale(model, 2.0)


@torch.no_grad()
def _scale(model: Any, factor: float) -> None:
    for weight in (model.model.layers[-1].mlp.down_proj.weight, model.model.norm.weight):
        weight.mul_(factor)


async def speed(setup: Setup, engine: Engine) -> str:
    """Tokens per second of one request and of 16, beside the bound: every token of one request reads all weights once."""
    bytes_ = sum(value.numel() for value in setup.weights().tensors.values()) * (4 if isinstance(engine, LocalEngine) else 2)
    source, rate = memory_bandwidth(setup.device)
    await generate(setup, engine, 1)
    told = []
    for count in (1, 16):
        began = time.perf_counter()
        tokens = sum(len(one.ids) for _, one in await generate(setup, engine, count, 64))
        speed = tokens / (time.perf_counter() - began)
        told.append(f"{speed:.1f} tokens/s with {count}, {speed / (count * rate / bytes_):.2%} of the bound")
    return f"{'; '.join(told)} ({gigabytes(bytes_)} of weights at {rate / 1e9:,.0f} GB/s, {source})"


def memory_bandwidth(device: Device) -> tuple[str, float]:
    for name, rate in PUBLISHED.items():
        if device.kind == "cuda" and name in device.name:
            return "published", rate
    source = torch.ones(1 << 26, device=device.torch)
    target = torch.empty_like(source)
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        if device.kind == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return "measured by a copy", 2 * source.numel() * 4 / min(taken)


def fits(setup: Setup) -> str:
    """The forecast for a rank of these settings fits the device.

    Raises:
        RuntimeError: it does not.
    """
    told, room = (
        forecast(setup.model_config, setup.settings, setup.ranks, setup.device),
        device_memory(setup.device, setup.ranks),
    )
    text = f"each of {setup.ranks} ranks ({setup.settings.parallel.kind}): {told}; usable: {gigabytes(room)}"
    if told.peak > room:
        raise RuntimeError(f"{text}; use more ranks with parallel.kind=fsdp2, model.grad_ckpt=true, or smaller rl.micro_tokens")
    return text


def memory(setup: Setup) -> str:
    """An update of a model as wide as this one, with two layers at most, against its forecast."""
    few = type(setup.model_config)(**(setup.model_config.to_dict() | {"layer_types": None}))
    few.num_hidden_layers = min(2, few.num_hidden_layers)
    tokens = TOKENS[setup.device.kind]
    rl = msgspec.structs.replace(setup.settings.rl, micro_tokens=tokens, max_response=tokens, updates_per_rollout=1)
    apart = [config.Engine(kind="vllm")]
    settings = msgspec.structs.replace(setup.settings, rl=rl, parallel=config.Parallel(), stages=[], engines=apart)
    model = AutoModelForCausalLM.from_config(few, dtype=torch.float32, attn_implementation=settings.model.attn)
    if settings.model.grad_ckpt:
        checkpoint_layers(model)
    learner = Learner(model.to(setup.device.torch), rl, Ranks(config.Parallel(), setup.device), settings.model.logit_rows)
    ids = [number % few.vocab_size for number in range(tokens)]
    samples = [Sample(ids, [0] + [1] * (tokens - 1), [-1.0] * tokens, 1.0, 0)] * 2
    learner.update(samples, 0)
    real = measured_peak(setup.device, lambda: learner.update(samples, 1), known=tensors_of(model, learner.optimizer))
    told = forecast(few, settings, 1, setup.device).peak
    text = f"forecast {gigabytes(told)}, measured {gigabytes(real)} ({few.num_hidden_layers} layers, {tokens} tokens)"
    if abs(told / real - 1) > MEMORY_TOLERANCE:
        raise RuntimeError(f"{text}: more than {MEMORY_TOLERANCE:.0%} apart")
    return text


def collective_bandwidth(setup: Setup) -> str:
    world = torch.cuda.device_count() if setup.device.kind == "cuda" else max(2, setup.ranks)
    if world < 2:
        raise Skip("one GPU has no collectives")
    found = collectives.bandwidth(setup.device, world)
    return f"{setup.device.backend}, {world} ranks: " + ", ".join(
        f"{name} {rate / 1e9:.2f} GB/s" for name, rate in found.items()
    )
