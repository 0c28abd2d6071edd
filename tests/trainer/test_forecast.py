"""The forecast of memory against the bytes that real tensors have."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from grpo_roc import config, forecast
from grpo_roc.distributed import DTYPES, Device, Ranks, pick_device
from grpo_roc.learner import Learner, Sample
from grpo_roc.model import checkpoint_layers, make_model
from loadtest.support.processes import free_port

CPU = pick_device("fp32")
SHAPES = [(64, 2, 128, 300), (128, 3, 256, 2000)]  # hidden, layers, ffn, vocabulary
TOKENS = 192


def small(hidden: int, layers: int, ffn: int, vocabulary: int) -> Any:
    return make_model(config.Model(hidden=hidden, layers=layers, ffn=ffn, heads=4, kv_heads=2), vocabulary, 512, 0)


def settings(**model: Any) -> config.Config:
    rl = config.Rl(micro_tokens=TOKENS, max_response=TOKENS, warmup=0)
    return config.Config(rl=rl, model=config.Model(**model), engines=[config.Engine(kind="vllm")])


def samples() -> list[Sample]:
    """Two rows of as many tokens as a micro-batch may have; all but the first are learned."""
    return [Sample([n % 200 for n in range(TOKENS)], [0] + [1] * (TOKENS - 1), [-1.0] * TOKENS, 1.0, 0)] * 2


def kept(model: Any) -> int:
    """Bytes that a real forward pass keeps for the backward pass, without parameters."""
    own, found = {parameter.untyped_storage()._cdata for parameter in model.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train().model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kept_activations_are_within_two_percent(shape: tuple[int, int, int, int], dtype: str) -> None:
    model = small(*shape).to(DTYPES[dtype])
    size = forecast.size_of(model.config, TOKENS, DTYPES[dtype])
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    told, real = size.kept_by_rest + size.layers * size.kept_by_layer, kept(model)
    print(f"{shape} {dtype}: forecast {told}, measured {real}")
    assert told == pytest.approx(real, rel=0.02)


def test_other_architectures_are_traced_as_they_are() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
        )
    )
    size = forecast.size_of(model.config, TOKENS, torch.float32)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.kept_by_rest + 4 * size.kept_by_layer == pytest.approx(kept(model), rel=0.02)
    assert size.kv_token == 2 * 4 * 16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad_ckpt", [False, True])
def test_the_peak_of_an_update_is_within_ten_percent(shape: tuple[int, int, int, int], grad_ckpt: bool) -> None:
    model, wanted = small(*shape), settings(grad_ckpt=grad_ckpt)
    if grad_ckpt:
        checkpoint_layers(model)
    learner = Learner(model, wanted.rl, Ranks(config.Parallel(), CPU))
    learner.update(samples(), 0)  # Adam's moments exist from the first update on
    told = forecast.forecast(model.config, wanted, 1, CPU)
    known = forecast.tensors_of(model, learner.optimizer)
    real = forecast.measured_peak(CPU, lambda: learner.update(samples(), 1), known=known)
    print(f"{shape}, checkpointing {grad_ckpt}: forecast {told.peak}, measured {real}, {told}")
    assert told.peak == pytest.approx(real, rel=0.1)


def _states_as_rank(kind: Any, rank: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    ranks = Ranks(config.Parallel(kind=kind), CPU)
    learner = Learner(ranks.shard(small(*SHAPES[1])), settings().rl, ranks)
    held: dict[str, int] = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: held.update(gradients=_bytes(p.grad for p in learner.model.parameters()))
    )
    learner.update(samples(), 0)
    held["parameters"] = _bytes(learner.model.parameters())
    states = (value for state in learner.optimizer.state.values() for name, value in state.items() if name != "step")
    held["moments"] = _bytes(states)
    results.put((rank, held))
    ranks.close()


def _bytes(tensors: Any) -> int:
    return sum(local.numel() * local.element_size() for local in (getattr(one, "_local_tensor", one) for one in tensors))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_states_of_two_ranks_are_within_three_percent(kind: str) -> None:
    """Shards are rounded up to whole rows."""
    fork, port = multiprocessing.get_context("fork"), free_port()
    results = fork.Queue()
    ranks = [fork.Process(target=_states_as_rank, args=(kind, rank, port, results)) for rank in range(2)]
    for one in ranks:
        one.start()
    found = dict(results.get(timeout=600) for _ in ranks)
    for one in ranks:
        one.join(120)
    wanted = msgspec.structs.replace(settings(), parallel=config.Parallel(kind=kind))
    told = forecast.forecast(small(*SHAPES[1]).config, wanted, 2, CPU)
    for held in found.values():
        for name, size in held.items():
            assert getattr(told, name) == pytest.approx(size, rel=0.03), (kind, name)


def test_the_settings_of_the_gpu_node_fit_and_those_without_sharding_do_not() -> None:
    """Qwen3-14B on four MI300X of 192 GB."""
    model = Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    gpu = Device("cuda", "MI300X", torch.bfloat16, "nccl")
    wanted = config.load("rocm_8gpu")
    sharded = forecast.forecast(model, wanted, 4, gpu)
    assert 14.7e9 < sharded.parameters < 14.8e9 * 1.01 and sharded.peak < forecast.USABLE * 192e9, str(sharded)
    whole = forecast.forecast(model, msgspec.structs.replace(wanted, parallel=config.Parallel()), 1, gpu)
    assert whole.peak > 192e9, str(whole)
    print(sharded)


def test_a_local_engine_counts_its_weights_and_its_cache(untaught: Path) -> None:
    model = small(*SHAPES[0])
    base = settings()
    local = msgspec.structs.replace(base, engines=[config.Engine(capacity=1000)])
    apart, beside = (forecast.forecast(model.config, one, 1, CPU) for one in (base, local))
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert beside.peak - apart.peak == weights + 2 * 2 * 2 * 16 * 1001 * 4  # K and V, layers, KV heads, head size, cells, bytes
