"""The local engine computes the same numbers as the model, in a cache of limited size."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_roc import config
from grpo_roc.distributed import pick_device
from grpo_roc.engines.base import EngineError, Sampling
from grpo_roc.engines.local import LocalEngine
from grpo_roc.engines.weights import Weights
from grpo_roc.model import load_model


def _model(folder: Path) -> Any:
    return load_model(folder, config.Model(), pick_device()).eval()


def _engine(folder: Path, **settings: Any) -> LocalEngine:
    model = _model(folder)
    return LocalEngine(model.config, model.state_dict(), config.Engine(**({"max_len": 256, "capacity": 4096} | settings)))


def test_logprobs_are_those_of_a_full_forward_pass(untaught: Path) -> None:
    engine, model = _engine(untaught), _model(untaught)
    prompts = [[5, 6, 7], list(range(10, 40)), [3]]
    generated = engine.generate_all([(str(n), ids, Sampling(12, 0.7, (), (n,))) for n, ids in enumerate(prompts)])
    for ids, one in zip(prompts, generated, strict=True):
        logits = model(input_ids=torch.tensor([ids + one.ids])).logits[0, len(ids) - 1 : -1] / 0.7
        whole = torch.log_softmax(logits, -1)
        assert torch.allclose(whole.gather(1, torch.tensor(one.ids)[:, None])[:, 0], torch.tensor(one.logprobs), atol=1e-4)


def test_a_second_turn_reads_only_what_is_new(untaught: Path) -> None:
    engine, model = _engine(untaught), _model(untaught)
    first = engine.generate_all([("a", [5, 6, 7], Sampling(4))])[0]
    before = engine.read_tokens
    context = [5, 6, 7, *first.ids, 8, 9]
    second = engine.generate_all([("a", context, Sampling(1))])[0]
    assert engine.read_tokens - before == 3  # the last sampled token and the two new ones
    whole = torch.log_softmax(model(input_ids=torch.tensor([context])).logits[0, -1], -1)
    assert second.logprobs[0] == pytest.approx(whole[second.ids[0]].item(), abs=1e-4)


def test_overflow_evicts_and_computes_again_with_the_same_tokens(untaught: Path) -> None:
    asked = [(str(n), [5, 6, 7, n], Sampling(40, 1.0, (), (n,))) for n in range(8)]
    roomy = _engine(untaught)
    wanted = roomy.generate_all(asked)
    tight = _engine(untaught, capacity=120)
    found = tight.generate_all(asked)
    assert [one.ids for one in found] == [one.ids for one in wanted]
    assert tight.evictions > 0 and tight.recomputed_tokens > 0 and roomy.recomputed_tokens == 0
    assert tight.read_tokens == roomy.read_tokens + tight.recomputed_tokens
    assert sum(one.preempted for one in found) > 0


def test_the_cache_never_holds_more_than_its_capacity(untaught: Path) -> None:
    engine = _engine(untaught, capacity=100)
    for number in range(6):
        engine.submit(str(number), [1, 2, 3], Sampling(30, 1.0, (), (number,)))
    while engine.busy:
        engine.step()
        held = [cell for request in engine._requests.values() for cell in request.cells]
        assert len(held) == len(set(held)) <= 100
        assert len(held) + len(engine._free) == 100


def test_a_sample_does_not_depend_on_the_rest_of_the_batch(untaught: Path) -> None:
    engine = _engine(untaught)
    alone = engine.generate_all([("a", [5, 6], Sampling(10, 1.0, (), (7, 7)))])[0]
    engine.drop("a")
    crowd = [(f"x{n}", [n, n + 1, 3], Sampling(10, 1.0, (), (n,))) for n in range(5)]
    among = engine.generate_all([*crowd, ("a", [5, 6], Sampling(10, 1.0, (), (7, 7)))])[-1]
    assert alone.ids == among.ids


async def test_new_weights_drop_what_was_computed_with_the_old_ones(untaught: Path) -> None:
    engine, model = _engine(untaught), _model(untaught)
    engine.generate_all([("a", [5, 6, 7], Sampling(4))])
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    await engine.update_weights(Weights(model.state_dict(), 3))
    context = list(engine._requests["a"].ids)
    generated = engine.generate_all([("a", context, Sampling(1))])[0]
    whole = torch.log_softmax(model(input_ids=torch.tensor([context])).logits[0, -1], -1)
    assert generated.logprobs[0] == pytest.approx(whole[generated.ids[0]].item(), abs=1e-4)
    assert generated.weight_version == 3


def test_what_can_never_fit_is_refused(untaught: Path) -> None:
    with pytest.raises(EngineError, match="more than the 64"):
        _engine(untaught, capacity=64).submit("a", [1] * 60, Sampling(10))


async def test_rollouts_share_steps_when_they_come_at_different_times(untaught: Path) -> None:
    engine = _engine(untaught)

    async def late(number: int) -> int:
        await asyncio.sleep(0.001 * number)
        return len((await engine.generate(str(number), [1, 2], Sampling(20, 1.0, (), (number,)))).ids)

    assert await asyncio.gather(*(late(number) for number in range(6))) == [20] * 6
    assert engine.steps < 6 * 20


async def test_a_failing_step_raises_in_every_waiting_request(untaught: Path) -> None:
    engine = _engine(untaught)
    engine._decoder._embed = torch.zeros(1, 1)
    with pytest.raises((RuntimeError, IndexError)):
        await engine.generate("a", [1, 2], Sampling(2))
