"""The vLLM and SGLang engines against servers that accept only the real schemas."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_server import FixtureServer, serving_fixture

from grpo_roc.engines.base import EngineError, Load, Sampling
from grpo_roc.engines.sglang import SglangEngine
from grpo_roc.engines.vllm import VllmEngine

KINDS: dict[str, Any] = {"vllm-0.32.0": VllmEngine, "sglang-0.5.23": SglangEngine}
GENERATE = {"vllm-0.32.0": "POST /inference/v1/generate", "sglang-0.5.23": "POST /generate"}


@pytest.fixture(params=KINDS)
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[str, FixtureServer]]:
    with serving_fixture(request.param) as server:
        yield request.param, server


async def test_tokens_and_logprobs_come_back(peer: tuple[str, FixtureServer]) -> None:
    name, server = peer
    engine = KINDS[name](server.url)
    generated = await engine.generate("r", [1, 2, 3], Sampling(16, 0.7, (9,), (1, 2)))
    assert (generated.ids, generated.logprobs, generated.finish) == ([4, 5, 9], [-0.5, -1.25, -0.125], "stop")
    (_, body), *_ = server.seen
    assert (body.get("token_ids") or body.get("input_ids")) == [1, 2, 3]
    await engine.aclose()


async def test_load_is_read_from_what_the_engine_publishes(peer: tuple[str, FixtureServer]) -> None:
    name, server = peer
    engine = KINDS[name](server.url)
    assert await engine.load() == Load(capacity=16000, used=4000, running=3, waiting=2, preempted=7)
    await engine.aclose()


async def test_weights_are_written_to_a_file_that_the_engine_loads(peer: tuple[str, FixtureServer]) -> None:
    name, server = peer
    engine = KINDS[name](server.url)
    await engine.update_weights({"a": torch.ones(2)}, 3)
    asked = [body for _, body in server.seen if body]
    path = asked[0].get("model_path") or asked[0]["kwargs"]["weights_path"]
    from safetensors.torch import load_file

    assert load_file(f"{path}/model.safetensors")["a"].tolist() == [1, 1]
    assert (await engine.generate("r", [1], Sampling(4))).weight_version == 3
    await engine.aclose()


async def test_an_unknown_field_is_refused_by_name(peer: tuple[str, FixtureServer]) -> None:
    name, server = peer
    route = copy.deepcopy(server.routes[GENERATE[name]])
    route["inside"]["sampling_params"].remove("temperature")
    server.routes[GENERATE[name]] = route
    engine = KINDS[name](server.url)
    with pytest.raises(EngineError, match=r"unknown field sampling_params\.temperature"):
        await engine.generate("r", [1], Sampling(4))
    await engine.aclose()


async def test_a_missing_field_in_the_answer_is_an_error_and_not_a_guess(peer: tuple[str, FixtureServer]) -> None:
    name, server = peer
    route = copy.deepcopy(server.routes[GENERATE[name]])
    answer = route["answer"]
    (answer["choices"][0] if "choices" in answer else answer["meta_info"]).pop("finish_reason")
    server.routes[GENERATE[name]] = route
    engine = KINDS[name](server.url)
    with pytest.raises(EngineError, match="finish_reason"):
        await engine.generate("r", [1], Sampling(4))
    await engine.aclose()


async def test_an_engine_that_is_not_there_is_named(peer: tuple[str, FixtureServer]) -> None:
    engine = KINDS[peer[0]]("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await engine.load()
    await engine.aclose()
