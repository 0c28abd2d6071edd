"""The memory that each rank needs for training, computed without allocating it; and the measured peak of a real run.

The model is built of fake tensors, which have a shape and no memory, and its forward pass is traced. So the forecast covers
every architecture of `transformers`. The tensors kept for the backward pass take the same memory in every layer, so models with
one and with two layers are traced.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_roc import config
from grpo_roc.distributed import DTYPES, Device

MASTER = 4  # bytes of a parameter, of its gradient and of each of Adam's two moments: fp32
USABLE = 0.9  # of a device's memory: the rest is for buffers of collectives and for fragmentation
LOGIT_COPIES = 3  # in fp32 at the peak: input and output of the softmax, and a gradient

# A traced model always makes a mask for `sdpa`; a computed one only if a row has several samples.
UNMASKED = "sdpa_without_mask"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)


class Forecast(NamedTuple):
    """Bytes on one rank."""

    parameters: int
    gradients: int
    moments: int
    gathered: int  # fsdp2: the parameters and gradients of the layers in use, not sharded
    activations: int
    recomputed: int  # with gradient checkpointing: the activations of one layer
    logits: int
    optimizer: int  # temporary tensors of Adam's step
    engine_weights: int  # of an engine on the same device, else 0
    engine_cache: int
    sleeping: bool  # the engine frees its memory during the update

    @property
    def training(self) -> int:
        """The peak of an update: an earlier micro-batch left gradients; layers are recomputed after the logits are freed."""
        update = self.gathered + self.activations + max(self.logits, self.recomputed)
        return self.parameters + self.gradients + self.moments + max(update, self.optimizer)

    @property
    def peak(self) -> int:
        engine = self.engine_weights + self.engine_cache
        if self.sleeping:
            return max(self.training, self.parameters + self.moments + engine)
        return self.training + engine

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in self._fields[:-1] if getattr(self, name)}
        return f"{gigabytes(self.peak)} at the peak: " + ", ".join(
            f"{name.replace('_', ' ')} {gigabytes(size)}" for name, size in parts.items()
        )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


class Size(NamedTuple):
    """Of a model: numbers of parameters, and bytes that its forward pass keeps for the backward pass."""

    parameters: int
    layer: int  # parameters of one
    layers: int
    kept_by_layer: int
    kept_by_rest: int
    kv_token: int  # elements of the KV cache of one token
    hidden: int
    vocabulary: int


def size_of(model_config: Any, tokens: int, dtype: torch.dtype, *, packing: bool = False) -> Size:
    """Trace a forward pass of one row of `tokens` tokens that computes in `dtype`."""
    text = model_config.get_text_config()
    (one, layer, kept), (two, _, kept_by_two) = (_trace(text, layers, tokens, dtype, packing) for layers in (1, 2))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = text.num_hidden_layers
    return Size(
        one + (layers - 1) * (two - one),
        layer,
        layers,
        kept_by_two - kept,
        2 * kept - kept_by_two,
        2 * layers * heads * head_dim,
        text.hidden_size,
        text.vocab_size,
    )


def _trace(text: Any, layers: int, tokens: int, dtype: torch.dtype, packing: bool) -> tuple[int, int, int]:
    """Parameters of the model, of a layer, and bytes kept for the backward pass, with so many layers."""
    few = type(text)(**(text.to_dict() | {"num_hidden_layers": layers, "layer_types": None}))
    few._attn_implementation = "sdpa" if packing else UNMASKED
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(few, dtype=dtype).train()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = torch.zeros(1, tokens, dtype=torch.long)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        found = sum(kept.values())
        del hidden
    count = sum(parameter.numel() for parameter in model.parameters())
    return count, sum(parameter.numel() for parameter in model.model.layers[0].parameters()), found


def forecast(model_config: Any, settings: config.Config, world: int, device: Device) -> Forecast:
    """For RL with these settings on `world` ranks. Assumes that every token of a micro-batch is learned."""
    sharded = settings.parallel.kind == "fsdp2"
    dtype = device.dtype if sharded else DTYPES["fp32"]  # only FSDP computes in another dtype than it stores
    longest = max([settings.rl.max_response, *(stage.max_response for stage in settings.stages)])
    tokens = max(settings.rl.micro_tokens, longest)  # a longer rollout is a micro-batch of its own
    size = size_of(model_config, tokens, dtype, packing=settings.rl.packing)
    share = world if sharded else 1
    own = -(-size.parameters // share) * MASTER
    rest = size.parameters - size.layers * size.layer
    activations = size.kept_by_rest + size.layers * size.kept_by_layer
    if settings.model.grad_ckpt:
        activations = size.kept_by_rest + size.layers * tokens * size.hidden * dtype.itemsize
    rows = min(tokens, settings.model.logit_rows or tokens)
    cast = 0 if dtype == torch.float32 else dtype.itemsize
    weights, cache, sleeping = _engine(settings, size)
    return Forecast(
        parameters=own,
        gradients=own,
        moments=2 * own,
        # The next layer is gathered while one is computed; embedding and output layer stay gathered.
        gathered=2 * (rest + 2 * size.layer) * dtype.itemsize if sharded else 0,
        activations=activations,
        recomputed=size.kept_by_layer if settings.model.grad_ckpt else 0,
        logits=rows * size.vocabulary * (LOGIT_COPIES * MASTER + cast),
        optimizer=own if device.kind == "cuda" else 0,  # on GPUs Adam handles all parameters at once
        engine_weights=weights,
        engine_cache=cache,
        sleeping=sleeping,
    )


def _engine(settings: config.Config, size: Size) -> tuple[int, int, bool]:
    """Weights and KV cache on the trainer's device: of a local engine, or of a server that shares the GPU."""
    one = settings.engines[0]
    if one.kind == "local":
        return size.parameters * MASTER, size.kv_token * (one.capacity + 1) * MASTER, False
    if settings.scheduler.colocated:
        return size.parameters * 2, size.kv_token * one.max_len * 2, True  # bf16; the cache of the longest rollout at least
    return 0, 0, False


def device_memory(device: Device, ranks: int) -> int:
    """Bytes that one rank can use."""
    if device.kind == "cuda":
        return int(USABLE * torch.cuda.get_device_properties(device.torch).total_memory)
    return int(USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks)


def measured_peak(device: Device, body: Callable[[], object], *, known: Iterable[torch.Tensor] = ()) -> int:
    """The most bytes of tensors at any time while `body` ran; `known`: the tensors from before that count."""
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        body()
        return int(torch.cuda.max_memory_allocated())
    with _Tracker(known) as tracker:
        body()
    return tracker.peak


class _Tracker(TorchDispatchMode):
    """Counts the storages that operations return, from their first use until they are freed."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0
        for tensor in known:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        self.peak = max(self.peak, sum(self._live.values()))
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, storage._cdata, None)


def tensors_of(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and Adam's moments."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
