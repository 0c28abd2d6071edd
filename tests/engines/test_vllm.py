"""vLLM against the trainer's own model: the same log-probabilities, new weights, and the figures that it publishes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import SMOLLM2, Vllm

from grpo_roc import config
from grpo_roc.checkpoint import untied
from grpo_roc.distributed import pick_device
from grpo_roc.engines import weights as weights_module
from grpo_roc.engines.base import EngineUnavailable, Generated, Sampling
from grpo_roc.engines.vllm import VllmEngine
from grpo_roc.engines.weights import Weights
from grpo_roc.loss import logprobs
from grpo_roc.model import load_model, load_tokenizer

# Mean and largest difference of a token's log-probability from the trainer's, which computes in fp32.
# Measured: 7e-6 and 5e-5 in fp32, 0.05 and 0.3 in bf16.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (0.08, 1.0)}
TEXTS = ["What is 12*7? Explain.", "Name the capital of France. " * 30]  # the second fills more than a block of 128 tokens


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(SMOLLM2)
    framed = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS]
    return [list(tokenizer.encode(text, add_special_tokens=False)) for text in framed]


async def generate(engine: VllmEngine) -> list[Generated]:
    return [await engine.generate(f"r{n}", ids, Sampling(24, 1.0, (2,), (n,))) for n, ids in enumerate(prompts())]


def differences(model: Any, generated: list[Generated]) -> torch.Tensor:
    found = []
    for ids, one in zip(prompts(), generated, strict=True):
        mask = torch.tensor([[0] * len(ids) + [1] * len(one.ids)])
        with torch.no_grad():
            whole = logprobs(model, torch.tensor([ids + one.ids]), mask)[0, len(ids) - 1 :]
        found.append((whole - torch.tensor(one.logprobs)).abs())
    return torch.cat(found)


async def test_logprobs_are_the_trainers_before_and_after_new_weights(
    smollm2: Vllm, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "SHARED", tmp_path)
    smollm2.wait()
    kind = request.node.callspec.params["smollm2"]
    mean, largest = TOLERANCES[kind]
    engine, model = VllmEngine(smollm2.url), load_model(SMOLLM2, config.Model(), pick_device()).eval()
    before = await generate(engine)
    started = differences(model, before)
    with torch.no_grad():
        for module in (model.model.layers[-1].mlp.down_proj, model.model.norm):
            module.weight.mul_(0.5)  # exact in bf16 too
    weights = Weights(untied(model.state_dict(), model.config), 1, getattr(torch, kind))
    stale = differences(model, before)
    await engine.update_weights(weights)
    after = await generate(engine)
    fresh = differences(model, after)
    for name, found in {"at the start": started, "new weights": fresh, "new weights not pushed": stale}.items():
        print(f"{kind}, {name}: mean difference {float(found.mean()):.1e}, largest {float(found.max()):.1e}")
    assert all(found.mean() < mean and found.max() < largest for found in (started, fresh))
    assert stale.mean() > 2 * mean and [one.ids for one in before] != [one.ids for one in after]
    assert {one.weight_version for one in after} == {1}
    weights.discard()

    unloaded = engine.weights = Weights({}, 2)
    with pytest.raises(EngineUnavailable, match=f"has the weights {weights.label} and not {unloaded.label}"):
        await generate(engine)
    await engine.aclose()
