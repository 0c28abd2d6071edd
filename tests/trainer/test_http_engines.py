"""The SGLang engine against a server that accepts only the real schemas; engines that fail, hang or lose their weights.

vLLM runs on CPUs: tests/engines has the real one.
"""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_server import SGLANG, FixtureServer, serving_fixture
from safetensors.torch import load_file

from grpo_roc import checkpoint, config
from grpo_roc.engines.base import EngineError, EngineUnavailable, Load, Sampling
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.sglang import SglangEngine
from grpo_roc.engines.weights import Weights

pytestmark = pytest.mark.usefixtures("shared")
GENERATE = "POST /generate"


@pytest.fixture
def pair() -> Iterator[list[FixtureServer]]:
    with serving_fixture(SGLANG) as first, serving_fixture(SGLANG) as second:
        yield [first, second]


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _weights(version: int = 3) -> Weights:
    return Weights({"a": torch.ones(2), "b": torch.full((3,), 0.3)}, version)


# -- one engine -----------------------------------------------------------------------------------------------------------


async def test_tokens_and_logprobs_come_back(server: FixtureServer) -> None:
    engine = SglangEngine(server.url)
    generated = await engine.generate("r", [1, 2, 3], Sampling(16, 0.7, (9,), (1, 2)))
    assert (generated.ids, generated.logprobs, generated.finish) == ([4, 5, 9], [-0.5, -1.25, -0.125], "stop")
    (_, body), *_ = server.seen
    assert body["input_ids"] == [1, 2, 3]
    await engine.aclose()


async def test_load_is_read_from_what_the_engine_publishes(server: FixtureServer) -> None:
    engine = SglangEngine(server.url)
    assert await engine.load() == Load(capacity=16000, used=4000, running=3, waiting=2, preempted=7, block=1)
    await engine.aclose()


async def test_an_unknown_field_is_refused_by_name(server: FixtureServer) -> None:
    route = copy.deepcopy(server.routes[GENERATE])
    route["inside"]["sampling_params"].remove("temperature")
    server.routes[GENERATE] = route
    engine = SglangEngine(server.url)
    with pytest.raises(EngineError, match=r"unknown field sampling_params\.temperature"):
        await engine.generate("r", [1], Sampling(4))
    await engine.aclose()


async def test_a_missing_field_in_the_answer_is_an_error_and_not_a_guess(server: FixtureServer) -> None:
    route = copy.deepcopy(server.routes[GENERATE])
    route["answer"]["meta_info"].pop("finish_reason")
    server.routes[GENERATE] = route
    engine = SglangEngine(server.url)
    with pytest.raises(EngineError, match="finish_reason"):
        await engine.generate("r", [1], Sampling(4))
    await engine.aclose()


async def test_an_engine_that_is_not_there_is_named() -> None:
    engine = SglangEngine("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
        await engine.load()
    await engine.aclose()


# -- weights --------------------------------------------------------------------------------------------------------------


async def test_all_engines_load_one_folder_in_bf16(pair: list[FixtureServer], shared: Path) -> None:
    scheduler = Scheduler([SglangEngine(server.url) for server in pair], config.Scheduler())
    weights = _weights()
    await scheduler.update_weights(weights)
    folders = {body["model_path"] for server in pair for _, body in server.seen if "model_path" in body}
    (folder,) = folders
    found = load_file(f"{folder}/model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16} and found["a"].tolist() == [1, 1]
    assert {server.label for server in pair} == {weights.label}
    assert (await scheduler.generate("r", [1], Sampling(4))).weight_version == 3
    await scheduler.update_weights(_weights(4))
    assert ["-4-" in name for name in _names(shared)] == [True]
    await scheduler.aclose()
    assert _names(shared) == []


async def test_an_engine_never_loads_weights_that_were_replaced(server: FixtureServer) -> None:
    engine, weights = SglangEngine(server.url), _weights()
    weights.discard()
    with pytest.raises(EngineUnavailable, match="were replaced by newer ones"):
        await engine.update_weights(weights)
    assert not server.seen
    await engine.aclose()


async def test_an_answer_of_other_weights_is_refused(server: FixtureServer) -> None:
    engine = SglangEngine(server.url)
    await engine.update_weights(_weights())
    server.label = "default"  # as after a restart
    with pytest.raises(EngineUnavailable, match="has the weights default and not 3-"):
        await engine.generate("r", [1], Sampling(4))
    await engine.aclose()


def test_large_weights_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    weights = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    checkpoint.save_weights(weights, tmp_path, torch.bfloat16, shard_bytes=16)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = (tmp_path / "model.safetensors.index.json").read_text()
    assert all(f'"{name}": "{files[number]}"' in index for name, number in {"a": 0, "b": 0, "c": 1}.items())
    assert {name for file in files for name in load_file(tmp_path / file)} == set("abc")


# -- engines that fail ----------------------------------------------------------------------------------------------------


async def _rollouts(scheduler: Scheduler, count: int) -> None:
    async def one(number: int) -> None:
        for length in (1, 20):
            generated = await scheduler.generate(str(number), [1] * length, Sampling(4))
            assert generated.ids == [4, 5, 9]
        await scheduler.release(str(number))

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(number) for number in range(count)))


async def _until_back(scheduler: Scheduler) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*(tracked.recovery for tracked in scheduler.engines if tracked.recovery is not None))
    assert all(tracked.usable for tracked in scheduler.engines)


async def test_a_5xx_is_tried_again(server: FixtureServer) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], config.Scheduler())
    await scheduler.update_weights(_weights())
    server.failing["/generate"] = 3
    await _rollouts(scheduler, 4)
    assert scheduler.losses >= 1 and scheduler.engines[0].reserved == len(scheduler.engines[0].rollouts) == 0
    await scheduler.aclose()


async def test_a_request_that_every_attempt_fails_ends_with_the_engines_words(server: FixtureServer) -> None:
    scheduler = Scheduler([SglangEngine(server.url)], config.Scheduler())
    server.failing["/generate"] = 1000
    with pytest.raises(EngineUnavailable, match="out of memory"):
        await scheduler.generate("r", [1], Sampling(4))
    await scheduler.aclose()


async def test_a_restarted_engine_gets_the_weights_before_it_is_used(pair: list[FixtureServer]) -> None:
    scheduler = Scheduler([SglangEngine(server.url) for server in pair], config.Scheduler(mode="static"))
    weights = _weights()
    await scheduler.update_weights(weights)
    pair[0].label = "default"
    await _rollouts(scheduler, 6)
    await _until_back(scheduler)
    assert pair[0].label == weights.label and scheduler.losses == 1
    await scheduler.aclose()


async def test_rollouts_move_from_a_dead_engine_which_is_lost_until_it_has_the_new_weights() -> None:
    with serving_fixture(SGLANG) as alive:
        with serving_fixture(SGLANG) as dying:
            address = dying.server_address
            scheduler = Scheduler([SglangEngine(one.url) for one in (dying, alive)], config.Scheduler(mode="static"))
            await scheduler.update_weights(_weights(1))
            await scheduler.generate("moves", [1], Sampling(4))
        await _rollouts(scheduler, 4)
        assert (await scheduler.generate("moves", [1] * 9, Sampling(4))).ids == [4, 5, 9]
        assert [tracked.usable for tracked in scheduler.engines] == [False, True]
        new = _weights(2)
        await scheduler.update_weights(new)
        with serving_fixture(SGLANG, address[1]) as back:
            await _until_back(scheduler)
            assert back.label == alive.label == new.label
        await scheduler.aclose()


async def test_an_engine_that_hangs_is_left_and_used_again(pair: list[FixtureServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SglangEngine, "check_s", 0.2)
    scheduler = Scheduler([SglangEngine(server.url) for server in pair], config.Scheduler(mode="static", check_s=0.1))
    await scheduler.update_weights(_weights())
    pair[0].answering.clear()
    await _rollouts(scheduler, 4)
    assert [tracked.usable for tracked in scheduler.engines] == [False, True]
    pair[0].answering.set()
    await _until_back(scheduler)
    await scheduler.aclose()


async def test_the_run_ends_when_no_engine_answers_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler([SglangEngine("http://127.0.0.1:9")], config.Scheduler(patience_s=0.3))
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await scheduler.generate("r", [1], Sampling(4))
    await scheduler.aclose()
