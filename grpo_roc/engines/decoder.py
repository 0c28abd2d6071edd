"""A Qwen3 or Llama forward pass with Hugging Face weights over a KV cache of single-token cells.

A step of a tiny model takes several milliseconds of Python in `transformers`, and about one here.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_roc.engines.rows import Rows

Linear = Callable[[Tensor], Tensor]
_SIZES = ("hidden_layers", "attention_heads", "key_value_heads")


class Decoder:
    """The weights, and a cache of `capacity` cells plus one that padding writes to."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], capacity: int, linear: str = "fp32") -> None:
        check_model(config)
        self.layers, self.heads, self.kv_heads = (getattr(config, f"num_{name}") for name in _SIZES)
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self._make_linear = quantized if linear == "int8" else plain
        self.capacity = capacity
        size = (self.layers, capacity + 1, self.kv_heads, self.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self._rows = Rows(self.keys, self.values)
        self._cos, self._sin = _rotations(config)
        self.put_weights(weights)

    def put_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._rows.clear()  # to free memory: the engine gives every request new cells
        w = {name.removeprefix("model."): value.detach().float() for name, value in weights.items()}
        self._embed, self._norm = w["embed_tokens.weight"].clone(), w["norm.weight"].clone()
        self._head = self._make_linear(w.get("lm_head.weight", self._embed))  # tied: the embeddings
        self._layers = [self._layer(w, f"layers.{number}.") for number in range(self.layers)]

    def _layer(self, w: Mapping[str, Tensor], at: str) -> "Layer":
        attention, mlp, make = at + "self_attn.", at + "mlp.", self._make_linear
        return Layer(
            w[at + "input_layernorm.weight"].clone(),
            w[at + "post_attention_layernorm.weight"].clone(),
            tuple(w[name].clone() if (name := f"{attention}{part}_norm.weight") in w else None for part in "qk"),
            make(torch.cat([w[attention + f"{part}_proj.weight"] for part in "qkv"])),
            make(w[attention + "o_proj.weight"]),
            make(torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]])),
            make(w[mlp + "down_proj.weight"]),
        )

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, cells: Tensor, context: Tensor, last: Tensor) -> Tensor:
        """Logits (B, V) after each row's token number `last`.

        tokens, positions (B, T): the tokens to read, and their positions in the request.
        cells (B, T): the cells for their K and V; `capacity` for padding.
        context (B, S): the cells of the request's tokens 0 … S-1, including the new ones.
        """
        b, s = context.shape
        mask = (torch.arange(s) <= positions[:, :, None])[:, None]  # (B, 1, T, S)
        flat, seen = cells.reshape(-1), context.reshape(-1)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[number].index_copy_(0, flat, k.reshape(-1, self.kv_heads, self.head_dim))
            self.values[number].index_copy_(0, flat, v.reshape(-1, self.kv_heads, self.head_dim))
            all_k = self.keys[number].index_select(0, seen).view(b, s, self.kv_heads, self.head_dim)
            all_v = self.values[number].index_select(0, seen).view(b, s, self.kv_heads, self.head_dim)
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), all_k.transpose(1, 2), all_v.transpose(1, 2), attn_mask=mask, enable_gqa=True
            )
            return y.transpose(1, 2)

        return self._logits(self._forward(tokens, positions, attend)[torch.arange(b), last])

    @torch.inference_mode()
    def decode(self, tokens: Tensor, cells: Sequence[list[int]]) -> Tensor:
        """Logits (B, V) after one more token (B, 1) of each request, whose cells include the one for this token."""
        rows = self._rows.find(cells)
        b, count = len(rows), self._rows.keys.shape[1]
        positions = torch.tensor([[len(one) - 1] for one in cells])
        place, newest, s = positions[:, 0], torch.tensor([one[-1] for one in cells]), max(map(len, cells))
        ends = torch.zeros(count, dtype=torch.int64).index_copy_(0, rows, place)
        mask = (torch.arange(s) <= ends[:, None])[:, None, None]  # (R, 1, 1, S); rows without a request read their first token

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            every = []
            for cache, filled, new in ((self.keys, self._rows.keys, k), (self.values, self._rows.values, v)):
                cache[number].index_copy_(0, newest, new[:, 0])
                filled[number][rows, :, place] = new[:, 0]
                every.append(filled[number][:, :, :s])
            # The query heads of a KV head stand where other queries would: nothing is repeated.
            grouped = q.new_zeros(count, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
            grouped[rows] = q.view(b, *grouped.shape[1:])
            return F.scaled_dot_product_attention(grouped, every[0], every[1], attn_mask=mask)[rows]

        return self._logits(self._forward(tokens, positions, attend)[:, 0])

    def _forward(self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """(B, T, C). `attend` gets the number of the layer, and q, k, v as (B, T, heads, D)."""
        b, t = tokens.shape
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]  # (B, T, 1, D)
        x = self._embed[tokens]
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(_rms(x, layer.before, self.eps)).view(b, t, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
            q, k = (
                _rotate(one if norm is None else _rms(one, norm, self.eps), cos, sin)
                for one, norm in zip((q, k), layer.qk_norms, strict=True)
            )
            x = x + layer.out(attend(number, q, k, v).reshape(b, t, -1))
            gate, up = layer.gate_up(_rms(x, layer.between, self.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(_rms(x, self._norm, self.eps))


class Layer(NamedTuple):
    before: Tensor  # norms: of the attention's input, and of the MLP's
    between: Tensor
    qk_norms: tuple[Tensor | None, ...]  # Qwen3 has them, Llama has none
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


def check_model(config: Any) -> None:
    """Raises ValueError, with the reason, for a model that this forward pass does not compute."""
    rope = getattr(config, "rope_parameters", None) or {}
    wrong = {
        f"it is a {config.model_type} model": config.model_type not in ("qwen3", "llama"),
        "its linear layers have biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "its positions are scaled": rope.get("rope_type", "default") != "default",
        "its attention has a window": getattr(config, "use_sliding_window", False),
    }
    if why := [reason for reason, found in wrong.items() if found]:
        raise ValueError(f"the local engine runs plain Qwen3 and Llama models, and {why[0]}; use vllm or sglang")


def plain(weight: Tensor) -> Linear:
    return partial(F.linear, weight=weight.clone())


def quantized(weight: Tensor) -> Linear:
    """int8 weights with a scale per row; inputs are quantized to int8 for each call, with one scale for the whole batch."""
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-9)
    with warnings.catch_warnings(action="ignore"):  # torch says that torchao will replace it
        rows = torch.quantize_per_channel(weight, scales, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(rows, None)
    # Without VNNI, the sums of 8-bit products overflow 16 bits: inputs get 7 bits.
    narrow = not torch.cpu._is_vnni_supported()
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, narrow)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotations(config: Any) -> tuple[Tensor, Tensor]:
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.arange(config.max_position_embeddings).float()[:, None] / theta**half  # (P, D/2)
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
