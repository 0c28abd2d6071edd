"""Several ranks over gloo: they learn what one does, hold shards, and write checkpoints that other numbers of ranks resume."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from trainer_harness import TINY, run_ranks, samples, with_settings

from grpo_roc import checkpoint, config, distributed, sft, sharded
from grpo_roc.distributed import Ranks, pick_device
from grpo_roc.learner import Learner
from grpo_roc.model import load_model

RL = msgspec.structs.replace(TINY.rl, lr=1e-3, warmup=0, micro_tokens=40)
FULL = msgspec.structs.replace(TINY.model, grad_ckpt=True, logit_rows=7)  # all that saves memory


def _ranks(kind: Any) -> Ranks:
    return Ranks(config.Parallel(kind=kind), pick_device())


def _assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 2e-5) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(value, found[name], atol=atol), name


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_model(folder, TINY.model, pick_device()).state_dict()
    return weights


# -- RL -------------------------------------------------------------------------------------------------------------------


def _learn(kind: str, packing: bool, folder: Path, out: Path) -> None:
    ranks = _ranks(kind)
    settings = msgspec.structs.replace(RL, packing=packing)
    learner = Learner(sharded.open_model(folder, FULL, ranks), settings, ranks, FULL.logit_rows)
    rows = [learner.update(ranks.broadcast(samples(5) if ranks.is_main else None), step) for step in range(3)]
    weights = ranks.gather_weights(learner.model)
    if ranks.is_main:
        torch.save((weights, rows[-1]), out)
    ranks.close()


@pytest.mark.parametrize(("kind", "packing"), [("ddp", False), ("fsdp2", False), ("fsdp2", True)])
def test_two_ranks_learn_what_one_does(untaught: Path, tmp_path: Path, kind: str, packing: bool) -> None:
    assert run_ranks(1, _learn, "none", False, untaught, tmp_path / "1") == [0]
    assert run_ranks(2, _learn, kind, packing, untaught, tmp_path / "2") == [0, 0]
    (one, row), (two, other) = (torch.load(tmp_path / name) for name in "12")
    _assert_close(two, one)
    for name, number in row.items():
        assert other[name] == pytest.approx(number, rel=1e-3, abs=1e-5), name


def _wait(unused: None) -> None:
    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
    ranks = _ranks("ddp")
    if ranks.is_main:
        time.sleep(5)  # makes rollouts, or writes a checkpoint
    ranks.barrier()
    assert ranks.broadcast("samples" if ranks.is_main else None) == "samples"
    assert ranks.sum([1.0]) == [2.0] and ranks.max(float(ranks.rank)) == 1.0
    ranks.close()


def test_ranks_wait_for_rollouts_and_checkpoints_longer_than_for_gradients() -> None:
    assert run_ranks(2, _wait, None) == [0, 0]


def _save_slowly(folder: Path, out: Path) -> None:
    distributed.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
    ranks = _ranks("fsdp2")
    learner = Learner(sharded.open_model(folder, TINY.model, ranks), RL, ranks)
    finish = checkpoint.finish

    def slow(*arguments: Any) -> None:
        time.sleep(5)
        finish(*arguments)

    checkpoint.finish = slow
    sharded.save(out, ranks, learner.model, learner.optimizer, None, checkpoint.State(1), TINY)
    assert (out / "state.json").exists()
    learner.update(samples(), 0)
    ranks.close()


def test_a_slow_checkpoint_does_not_end_the_other_ranks(untaught: Path, tmp_path: Path) -> None:
    assert run_ranks(2, _save_slowly, untaught, tmp_path / "slow") == [0, 0]


# -- shards ---------------------------------------------------------------------------------------------------------------


def _open(folder: Path, out: Path) -> None:
    ranks = _ranks("fsdp2")
    model = sharded.open_model(folder, TINY.model, ranks)
    held = sum(value.to_local().numel() for value in model.parameters())
    weights = ranks.gather_weights(model)
    torch.save((held, weights), out / str(ranks.rank))
    ranks.close()


def test_a_rank_holds_its_share_of_a_published_model(untaught: Path, tmp_path: Path) -> None:
    assert run_ranks(2, _open, untaught, tmp_path) == [0, 0]
    model = load_model(untaught, TINY.model, pick_device())
    total = sum(value.numel() for value in model.parameters())
    (first, weights), (second, _) = (torch.load(tmp_path / name) for name in "01")
    assert first + second == total and max(first, second) < 0.6 * total
    _assert_close(weights, checkpoint.untied(model.state_dict(), model.config), atol=0)


def _learn_and_save(kind: str, source: Path, out: Path, first: int, last: int) -> None:
    """Steps `first` to `last`, and a checkpoint after them."""
    ranks = _ranks(kind)
    learner = Learner(sharded.open_model(source, TINY.model, ranks), RL, ranks)
    if first:
        sharded.load_optimizer(source, learner.model, learner.optimizer, ranks)
    for step in range(first, last):
        learner.update(samples(5), step)
    state = checkpoint.State(last)
    sharded.save(out / "latest", ranks, learner.model, learner.optimizer, None, state, TINY)
    sharded.save(out / "model", ranks, learner.model, None, None, state, TINY)
    ranks.close()


@pytest.fixture(scope="module")
def learned(untaught: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two ranks, over all steps and over half of them."""
    out = tmp_path_factory.mktemp("learned")
    for name, last in {"whole": 4, "half": 2}.items():
        assert run_ranks(2, _learn_and_save, "fsdp2", untaught, out / name, 0, last) == [0, 0]
    return out


@pytest.mark.parametrize("world", [2, 1, 3])
def test_a_sharded_checkpoint_resumes_with_any_number_of_ranks(learned: Path, tmp_path: Path, world: int) -> None:
    latest = learned / "half" / "latest"
    names = {path.name for path in latest.iterdir()}
    assert {"shards", "optimizer_shards", "config.json", "state.json"} <= names
    assert "optim.pt" not in names and not any(name.endswith(".safetensors") for name in names)
    assert len(list((latest / "optimizer_shards").glob("*.distcp"))) == 2, "each rank writes its own part"
    assert run_ranks(world, _learn_and_save, "fsdp2", latest, tmp_path, 2, 4) == [0] * world
    whole, half = (_weights(learned / name / "model") for name in ("whole", "half"))
    _assert_close(_weights(tmp_path / "model"), whole, atol=0 if world == 2 else 2e-5)
    assert not torch.allclose(whole["model.norm.weight"], half["model.norm.weight"], atol=2e-5)


def _die_while_saving(source: Path, out: Path) -> None:
    ranks = _ranks("fsdp2")
    learner = Learner(sharded.open_model(source, TINY.model, ranks), RL, ranks)
    learner.update(samples(5), 0)
    checkpoint.finish = lambda *_: os._exit(9)
    sharded.save(out / "latest", ranks, learner.model, learner.optimizer, None, checkpoint.State(1), TINY)


def test_a_checkpoint_of_ranks_that_died_is_absent_and_the_one_before_stays(untaught: Path, tmp_path: Path) -> None:
    assert run_ranks(2, _learn_and_save, "fsdp2", untaught, tmp_path, 0, 2) == [0, 0]
    codes = run_ranks(2, _die_while_saving, untaught, tmp_path)
    assert codes[0] == 9 and codes[1] != 0
    found = checkpoint.latest(tmp_path / "latest")
    assert found is not None and checkpoint.load_state(found, TINY).step == 2
    assert run_ranks(2, _learn_and_save, "fsdp2", found, tmp_path, 2, 3) == [0, 0]
    assert checkpoint.load_state(found, TINY).step == 3


# -- SFT ------------------------------------------------------------------------------------------------------------------


def _teach(kind: str, start: Path, out: Path, checkpoint_every: int) -> None:
    sft.CHECKPOINT_EVERY = checkpoint_every
    settings = with_settings(f"parallel.kind={kind}", "sft.steps=4", "sft.batch=6", "sft.micro=2", "sft.log_every=1")
    sft.run_sft(settings, start, out)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_are_taught_what_one_is_and_go_on_from_a_checkpoint(untaught: Path, tmp_path: Path, kind: str) -> None:
    """Three micro-batches for two ranks: one fills up and must not count."""
    assert run_ranks(1, _teach, "none", untaught, tmp_path / "one", 100) == [0]
    assert run_ranks(2, _teach, kind, untaught, tmp_path / "two", 3) == [0, 0]
    one, two = tmp_path / "one", tmp_path / "two"
    _assert_close(_weights(two / "model"), _weights(one / "model"), atol=1e-4)
    rows, others = sft.metrics.read(one), sft.metrics.read(two)
    assert len(rows) == len(others) == 4
    for row, other in zip(rows, others, strict=True):
        assert other == pytest.approx(row, rel=1e-3)
    before = _weights(two / "model")
    assert run_ranks(2, _teach, kind, untaught, two, 3) == [0, 0]  # takes step 3 again, from the checkpoint
    _assert_close(_weights(two / "model"), before, atol=0)
