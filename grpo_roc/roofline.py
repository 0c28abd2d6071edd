"""Generation speed of one MI300X, computed from a model's shape and the GPU's published figures. Nothing here was measured.

A decoding step reads all weights and the KV cache of every running request, and does two operations per parameter and token.
The slower of reading and computing determines its time. A prefill is compute-bound.
"""

from typing import Any, NamedTuple

# AMD Instinct MI300X data sheet: 192 GB of HBM3, peak of 5.3 TB/s, peak of 1307.4 TFLOPS (bf16, dense).
HBM_BYTES = 192e9
BANDWIDTH = 5.3e12
FLOPS = 1307.4e12
# Assumed, not measured: shares of these peaks that real kernels reach, and bytes for activations and graphs.
BANDWIDTH_SHARE = 0.7
FLOPS_SHARE = 0.4
OTHER_BYTES = 6e9
BF16 = 2


class Shape(NamedTuple):
    """Of a dense decoder such as Qwen3 or Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden * (self.vocabulary * (1 if self.tied else 2) + 1)

    @property
    def weight_bytes(self) -> int:
        return BF16 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Per token."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim


# As in the models' config.json.
QWEN3_14B = Shape(5120, 40, 40, 8, 128, 17408, 151936)
QWEN3_06B = Shape(1024, 28, 16, 8, 128, 3072, 151936, tied=True)


def shape_of(config: Any) -> Shape:
    """Of a Hugging Face configuration."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.intermediate_size,
        config.vocab_size,
        bool(config.tie_word_embeddings),
    )


def kv_capacity(shape: Shape, utilization: float = 0.9) -> int:
    """Tokens of KV cache beside the weights, in the share of the memory that the engine may use."""
    return max(0, int((HBM_BYTES * utilization - shape.weight_bytes - OTHER_BYTES) / shape.kv_bytes))


def step_s(shape: Shape, batch: int, context: int) -> float:
    """Of one decoding step, with `context` tokens cached for each of `batch` requests."""
    read = shape.weight_bytes + batch * context * shape.kv_bytes
    return max(read / (BANDWIDTH * BANDWIDTH_SHARE), batch * _flops(shape, context) / (FLOPS * FLOPS_SHARE))


def decode_tokens_per_s(shape: Shape, batch: int, context: int) -> float:
    return batch / step_s(shape, batch, context)


def prefill_s(shape: Shape, tokens: int) -> float:
    """To compute the KV cache of so many tokens, for example again after a preemption."""
    return tokens * _flops(shape, tokens // 2) / (FLOPS * FLOPS_SHARE)


def _flops(shape: Shape, context: int) -> int:
    """Of one token that attends to `context` others."""
    return 2 * shape.parameters + 4 * shape.layers * shape.heads * shape.head_dim * context
