"""The arithmetic of the MI300X model, with numbers that can be checked by hand."""

import pytest

from grpo_roc import roofline
from grpo_roc.model import load_model
from grpo_roc.roofline import QWEN3_06B, QWEN3_14B, Shape

TINY = Shape(hidden=8, layers=2, heads=4, kv_heads=2, head_dim=2, ffn=16, vocabulary=10)


def test_parameters_and_bytes_are_those_of_the_shape() -> None:
    # A layer: q and o 2·8·8, k and v 2·8·4, three matrices of 8·16, two norms of 8.
    assert TINY.parameters == 2 * (128 + 64 + 384 + 16) + 2 * 80 + 8
    assert TINY.weight_bytes == 2 * TINY.parameters
    assert TINY.kv_bytes == 2 * 2 * 2 * 2 * 2
    assert TINY._replace(tied=True).parameters == TINY.parameters - 80


def test_published_models_have_their_published_sizes() -> None:
    assert QWEN3_14B.parameters == pytest.approx(14.8e9, rel=0.01)
    assert QWEN3_06B.parameters == pytest.approx(0.6e9, rel=0.01)
    assert QWEN3_14B.kv_bytes == 163_840


def test_the_shape_is_read_from_a_models_configuration(untaught: object) -> None:
    from grpo_roc import config
    from grpo_roc.distributed import pick_device

    model = load_model(untaught, config.Model(), pick_device())  # type: ignore[arg-type]
    norms = sum(p.numel() for name, p in model.named_parameters() if "q_norm" in name or "k_norm" in name)
    assert roofline.shape_of(model.config).parameters == sum(p.numel() for p in model.parameters()) - norms


def test_the_cache_gets_what_weights_leave() -> None:
    left = 192e9 * 0.9 - QWEN3_14B.weight_bytes - 6e9
    assert roofline.kv_capacity(QWEN3_14B) == int(left / 163_840)
    assert roofline.kv_capacity(QWEN3_14B, 0.1) == 0


def test_small_batches_are_bound_by_the_weights_and_large_ones_by_the_cache() -> None:
    alone = roofline.step_s(QWEN3_14B, 1, 0)
    assert alone == pytest.approx(QWEN3_14B.weight_bytes / (5.3e12 * 0.7))
    # 64 requests with 4096 tokens read 64·4096·163,840 bytes more.
    assert roofline.step_s(QWEN3_14B, 64, 4096) - alone == pytest.approx(64 * 4096 * 163_840 / (5.3e12 * 0.7))
    assert roofline.decode_tokens_per_s(QWEN3_14B, 64, 4096) == pytest.approx(64 / roofline.step_s(QWEN3_14B, 64, 4096))


def test_many_short_requests_are_bound_by_operations() -> None:
    assert roofline.step_s(QWEN3_14B, 4096, 0) == pytest.approx(4096 * 2 * QWEN3_14B.parameters / (1307.4e12 * 0.4))


def test_a_prefill_takes_two_operations_per_parameter_and_its_attention() -> None:
    per_token = 2 * QWEN3_14B.parameters + 4 * 40 * 40 * 128 * 4096
    assert roofline.prefill_s(QWEN3_14B, 8192) == pytest.approx(8192 * per_token / (1307.4e12 * 0.4))
