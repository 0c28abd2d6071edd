"""Ways to save memory and time in the update: none may change it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_harness import TINY, samples

from grpo_roc import config
from grpo_roc.batches import fill_rows, micro_batches
from grpo_roc.distributed import Ranks, pick_device
from grpo_roc.learner import Learner
from grpo_roc.loss import logprobs_and_entropies, pad
from grpo_roc.model import load_model


def _model(folder: Path, **changes: Any) -> Any:
    return load_model(folder, msgspec.structs.replace(TINY.model, **changes), pick_device())


def _gradients(model: Any, *, logit_rows: int) -> dict[str, torch.Tensor]:
    every = samples()
    model.train()
    ids, mask = pad([one.ids for one in every]), pad([one.mask for one in every])
    found, _ = logprobs_and_entropies(model, ids, mask, 0.7, logit_rows=logit_rows)
    (found * torch.linspace(0.5, 1.5, found.shape[1])).sum().backward()
    return {name: value.grad for name, value in model.named_parameters()}


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert value.abs().max() > 0 and torch.allclose(value, other[name], atol=1e-4, rtol=1e-4), name


# -- logits ---------------------------------------------------------------------------------------------------------------


class _Elements(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return found


def _saved_elements(model: Any, logit_rows: int) -> int:
    """Elements that the forward pass keeps for the backward pass and that are as wide as the vocabulary."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (model.config.vocab_size,):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    every = samples()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_and_entropies(model, pad([one.ids for one in every]), pad([one.mask for one in every]), logit_rows=logit_rows)
    return sum(kept.values())


def test_logits_in_parts_give_the_same_log_probabilities_entropies_and_gradients(untaught: Path) -> None:
    every, model = samples(), _model(untaught)
    ids, mask = pad([one.ids for one in every]), pad([one.mask for one in every])
    whole = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float() / 0.7, -1)
    wanted = mask[:, 1:].float()
    for rows in (0, 7, 1000):
        chosen, entropies = logprobs_and_entropies(model, ids, mask, 0.7, logit_rows=rows)
        assert torch.allclose(chosen, whole.gather(2, ids[:, 1:, None])[..., 0] * wanted, atol=1e-4)
        assert torch.allclose(entropies, -(whole.exp() * whole).sum(-1) * wanted, atol=1e-3)
    _assert_same(_gradients(_model(untaught), logit_rows=0), _gradients(_model(untaught), logit_rows=7))


def test_logits_in_parts_need_less_memory(untaught: Path) -> None:
    trained, model = sum(one.tokens for one in samples()), _model(untaught)
    vocabulary = model.config.vocab_size
    whole, parts = _Elements(), _Elements()
    with whole:
        _gradients(_model(untaught), logit_rows=0)
    with parts:
        _gradients(_model(untaught), logit_rows=7)
    weights = max(value.numel() for value in model.parameters())  # the gradient of the output layer is as large
    assert parts.largest == max(weights, 7 * vocabulary)
    assert whole.largest == max(weights, trained * vocabulary)
    assert _saved_elements(model, 0) >= trained * vocabulary and _saved_elements(model, 7) == 0


# -- packing --------------------------------------------------------------------------------------------------------------


def test_rows_are_filled_up_to_the_budget_and_hold_every_sample_once() -> None:
    lengths = [5, 9, 2, 7, 3, 20, 1]
    rows = fill_rows(lengths, 12)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert sorted(sum(lengths[index] for index in row) for row in rows) == [3, 12, 12, 20]


def test_packed_samples_do_not_see_each_other(untaught: Path) -> None:
    model, every = _model(untaught), samples()
    (packed,) = micro_batches(every, "batch", 10_000, 1, packing=True)
    found, entropies = logprobs_and_entropies(model, packed.ids, packed.mask, positions=packed.positions)
    for one in every:
        alone, own = logprobs_and_entropies(model, pad([one.ids]), pad([one.mask]))
        first = _place(packed.ids[0].tolist(), one.ids)
        assert torch.allclose(found[0, first : first + len(one.ids) - 1], alone[0], atol=1e-4)
        assert torch.allclose(entropies[0, first : first + len(one.ids) - 1], own[0], atol=1e-3)
    mixed, _ = logprobs_and_entropies(model, packed.ids, packed.mask)
    assert not torch.allclose(mixed, found, atol=1e-2), "without positions the samples must see each other"


def _place(ids: list[int], part: list[int]) -> int:
    return next(first for first in range(len(ids)) if ids[first : first + len(part)] == part)


@pytest.mark.parametrize("norm", ["batch", "group", "seq"])
def test_a_packed_update_is_the_padded_one(untaught: Path, norm: str) -> None:
    found = {}
    for packing in (False, True):
        changes = {"packing": packing, "loss_norm": norm, "micro_tokens": 48, "is_cap": 2.0, "lr": 1e-3, "warmup": 0}
        settings = msgspec.structs.replace(TINY.rl, **changes)
        learner = Learner(_model(untaught), settings, Ranks(config.Parallel(), pick_device()))
        row = [learner.update(samples(), step) for step in range(2)][-1]
        found[packing] = (row, learner.model.state_dict())
    for name, value in found[False][0].items():
        assert found[True][0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name, weights in found[False][1].items():
        assert torch.allclose(weights, found[True][1][name], atol=2e-5), name


def test_packing_saves_padding() -> None:
    every = samples(12)
    padded, packed = (micro_batches(every, "batch", 64, 1, packing=packing) for packing in (False, True))
    assert sum(one.ids.numel() for one in packed) == sum(len(one.ids) for one in every)
    assert sum(one.ids.numel() for one in padded) > sum(one.ids.numel() for one in packed)
    assert max(one.ids.numel() for one in packed) <= 64
    assert len(micro_batches(every, "batch", 64, 4, packing=True)) % 4 == 0


# -- gradient checkpointing -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::FutureWarning")
def test_gradient_checkpointing_keeps_less_and_gives_the_same_gradients(untaught: Path) -> None:
    kept = {}

    def run(grad_ckpt: bool) -> dict[str, torch.Tensor]:
        kept[grad_ckpt] = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[grad_ckpt] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return _gradients(_model(untaught, grad_ckpt=grad_ckpt), logit_rows=7)

    _assert_same(run(False), run(True))
    assert kept[True] < kept[False] / 2
