"""A Qwen3 forward pass with Hugging Face weights over a KV cache of single-token cells.

A step of a tiny model takes several milliseconds of Python in `transformers`, and about one here.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SIZES = ("hidden_layers", "attention_heads", "key_value_heads")


class Decoder:
    """The weights, and a cache of `capacity` cells plus one that padding writes to."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], capacity: int) -> None:
        if config.model_type != "qwen3":
            raise ValueError(f"the local engine runs Qwen3 models, not {config.model_type}; use vllm or sglang")
        self.layers, self.heads, self.kv_heads = (getattr(config, f"num_{name}") for name in _SIZES)
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.capacity = capacity
        size = (self.layers, capacity + 1, self.kv_heads, self.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self._cos, self._sin = _rotations(config)
        self.put_weights(weights)

    def put_weights(self, weights: Mapping[str, Tensor]) -> None:
        w = {name.removeprefix("model."): value.detach().float() for name, value in weights.items()}
        self._embed, self._norm = w["embed_tokens.weight"].clone(), w["norm.weight"].clone()
        self._head = w.get("lm_head.weight", self._embed).clone()
        self._layers = [_layer(w, f"layers.{number}.") for number in range(self.layers)]

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, cells: Tensor, context: Tensor, last: Tensor) -> Tensor:
        """Logits (B, V) after each row's token number `last`.

        tokens, positions (B, T): the tokens to read, and their positions in the request.
        cells (B, T): the cells for their K and V; `capacity` for padding.
        context (B, S): the cells of the request's tokens 0 … S-1, including the new ones.
        """
        b, t = tokens.shape
        s = context.shape[1]
        mask = (torch.arange(s) <= positions[:, :, None])[:, None]  # (B, 1, T, S)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]  # (B, T, 1, D)
        flat, seen = cells.reshape(-1), context.reshape(-1)
        x = self._embed[tokens]  # (B, T, C)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(_rms(x, layer["in"], self.eps), layer["qkv"]).view(b, t, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
            q = _rotate(_rms(q, layer["q_norm"], self.eps), cos, sin)
            k = _rotate(_rms(k, layer["k_norm"], self.eps), cos, sin)
            self.keys[number].index_copy_(0, flat, k.reshape(-1, self.kv_heads, self.head_dim))
            self.values[number].index_copy_(0, flat, v.reshape(-1, self.kv_heads, self.head_dim))
            all_k = self.keys[number].index_select(0, seen).view(b, s, self.kv_heads, self.head_dim)
            all_v = self.values[number].index_select(0, seen).view(b, s, self.kv_heads, self.head_dim)
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), all_k.transpose(1, 2), all_v.transpose(1, 2), attn_mask=mask, enable_gqa=True
            )
            x = x + F.linear(y.transpose(1, 2).reshape(b, t, -1), layer["o"])
            gate, up = F.linear(_rms(x, layer["post"], self.eps), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(_rms(x[torch.arange(b), last], self._norm, self.eps), self._head)


def _layer(w: Mapping[str, Tensor], at: str) -> dict[str, Tensor]:
    attention, mlp = at + "self_attn.", at + "mlp."
    return {
        "in": w[at + "input_layernorm.weight"].clone(),
        "post": w[at + "post_attention_layernorm.weight"].clone(),
        "qkv": torch.cat([w[attention + f"{part}_proj.weight"] for part in "qkv"]),
        "q_norm": w[attention + "q_norm.weight"].clone(),
        "k_norm": w[attention + "k_norm.weight"].clone(),
        "o": w[attention + "o_proj.weight"].clone(),
        "gate_up": torch.cat([w[mlp + "gate_proj.weight"], w[mlp + "up_proj.weight"]]),
        "down": w[mlp + "down_proj.weight"].clone(),
    }


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
