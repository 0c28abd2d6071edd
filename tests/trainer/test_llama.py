"""A pretrained Llama in the local engine: its numbers, int8 weights, and models that it does not compute."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_roc import config
from grpo_roc.engines.base import Sampling
from grpo_roc.engines.decoder import check_model
from grpo_roc.engines.local import LocalEngine
from grpo_roc.loss import logprobs_and_entropies

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 72, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}  # fmt: skip


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    return model


def generated(model: Any, linear: str, count: int = 6) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Two turns of several requests at once: the engine's tokens with the model's own log-probabilities, and the engine's."""
    settings = config.Engine(capacity=2048, max_len=128, linear=linear)  # type: ignore[arg-type]
    engine = LocalEngine(model.config, model.state_dict(), settings)
    prompts = [[7 * n % 300 + 1, 5, 9 + n][: 1 + n % 3] for n in range(count)]
    first = engine.generate_all([(str(n), ids, Sampling(12, 1.0, (), (n,))) for n, ids in enumerate(prompts)])
    longer = [ids + one.ids + [11, 12] for ids, one in zip(prompts, first, strict=True)]
    second = engine.generate_all([(str(n), ids, Sampling(12, 1.0, (), (n, 1))) for n, ids in enumerate(longer)])
    own, entropies, engines = [], [], []
    for ids, one in zip(longer, second, strict=True):
        row = torch.tensor([ids + one.ids])
        mask = torch.tensor([[0] * len(ids) + [1] * len(one.ids)])
        with torch.no_grad():
            found = logprobs_and_entropies(model, row, mask)
        own.append(found[0][0, len(ids) - 1 :])
        entropies.append(found[1][0, len(ids) - 1 :])
        engines.append(one)
    return torch.stack(own), torch.stack(entropies), engines


@pytest.mark.parametrize("tied", [True, False])
def test_the_local_engine_computes_llama_as_transformers_does(tied: bool) -> None:
    own, entropies, engines = generated(llama(tied=tied), "fp32")
    assert torch.allclose(own, torch.tensor([one.logprobs for one in engines]), atol=1e-4)
    assert torch.allclose(entropies, torch.tensor([one.entropies for one in engines]), atol=1e-4)


def test_requests_may_join_and_leave_while_others_decode() -> None:
    model = llama(tied=True)
    engine = LocalEngine(model.config, model.state_dict(), config.Engine(capacity=300, max_len=128))
    requests = [engine.submit(f"early-{n}", [n + 1, 5], Sampling(2 + 5 * n, 1.0, (), (n,))) for n in range(8)]
    while engine.busy:
        engine.step()
        if engine.steps == 20:
            requests += [engine.submit(f"late-{n}", [n + 30], Sampling(70, 1.0, (), (n, 2))) for n in range(5)]
        if engine.steps == 40:
            engine.drop("late-0")
    assert engine.evictions > 0 and requests.pop(8).result is None
    for request in requests:
        own = logprobs_and_entropies(model, torch.tensor([request.ids]), torch.ones(1, len(request.ids)))[0][0]
        assert request.result is not None and len(request.new) == request.sampling.max_new
        assert torch.allclose(own[-len(request.new) :], torch.tensor(request.logprobs), atol=1e-4)


def test_int8_weights_are_close_but_not_the_same() -> None:
    own, _, engines = generated(llama(tied=True), "int8")
    difference = (own - torch.tensor([one.logprobs for one in engines])).abs()
    assert 1e-4 < difference.mean() < 0.1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"attention_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "scaled"),
        ({"use_sliding_window": True}, "window"),
    ],
)
def test_a_model_that_the_local_engine_does_not_compute_is_refused_with_the_reason(change: dict[str, Any], why: str) -> None:
    settings = LlamaConfig(**SHAPE)
    check_model(settings)
    for name, value in change.items():
        setattr(settings, name, value)
    with pytest.raises(ValueError, match=why):
        check_model(settings)
