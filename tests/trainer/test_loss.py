"""The loss against values computed by hand, and its independence from observations."""

import math
from pathlib import Path

import pytest
import torch

from grpo_roc import config
from grpo_roc.distributed import pick_device
from grpo_roc.loss import logprobs, policy_loss, row_weights, truncated_importance
from grpo_roc.model import load_model


def test_loss_is_the_one_computed_by_hand_with_both_sides_of_the_clip() -> None:
    old = torch.zeros(2, 3)
    ratios = torch.tensor([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    weights = torch.tensor([[0.2], [0.2]])
    found = policy_loss(ratios.log(), old, mask, torch.tensor([[2.0], [-1.0]]), weights, (0.2, 0.28))
    # Positive advantage: 1.5 is held at 1.28, 0.5 counts. Negative: 1.5 counts, 0.5 is held at 0.8. The last token is masked.
    by_hand = -(2 * 1.28 + 2 * 0.5 + 2 * 1.0 - 1 * 1.5 - 1 * 0.8) / 5
    assert float(found.value) == pytest.approx(by_hand, rel=1e-5)
    assert (found.clipped_low, found.clipped_high, found.tokens) == (1, 1, 5)


def test_on_policy_gradient_is_advantage_times_weight() -> None:
    now = torch.zeros(1, 2, requires_grad=True)
    policy_loss(now, now.detach(), torch.ones(1, 2), torch.tensor([[3.0]]), torch.tensor([[0.5]]), (0.2, 0.28)).value.backward()
    assert now.grad is not None and now.grad.tolist() == [[-1.5, -1.5]]


@pytest.mark.parametrize(
    ("norm", "weights"),
    [
        ("batch", [1 / 10] * 3),
        ("seq", [1 / 6, 1 / 9, 1 / 15]),
        ("group", [1 / 10, 1 / 10, 1 / 10]),  # tokens 2 and 3 in one group of 5, 5 in the other
    ],
)
def test_token_weights_sum_to_one(norm: str, weights: list[float]) -> None:
    tokens = [2, 3, 5]
    found = row_weights(tokens, [0, 0, 1], norm)  # type: ignore[arg-type]
    assert found == pytest.approx(weights)
    assert sum(w * t for w, t in zip(found, tokens, strict=True)) == pytest.approx(1)


def test_importance_weights_are_truncated() -> None:
    engine, mask = torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2)
    found = truncated_importance(torch.tensor([[-1.0, -1.0]]), engine, mask, 2.0)
    assert found.tolist() == [[1.0, 2.0]]


def test_observations_have_no_gradient(untaught: Path) -> None:
    """Only generated tokens have a gradient: with a mask of zeros there is none."""
    model = load_model(untaught, config.Model(), pick_device())
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    observed = logprobs(model, ids, torch.tensor([[0, 0, 0, 0, 0]])).sum()
    observed.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    # Another last observation token changes nothing before it.
    mask = torch.tensor([[0, 0, 1, 1, 0]])
    other = torch.tensor([[5, 6, 7, 8, 3]])
    assert torch.equal(logprobs(model, ids, mask), logprobs(model, other, mask))


def test_logprobs_are_those_of_the_whole_model(untaught: Path) -> None:
    model = load_model(untaught, config.Model(), pick_device()).eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
    found = logprobs(model, ids, mask)
    whole = torch.log_softmax(model(input_ids=ids).logits, -1)
    assert found[0, 1].item() == pytest.approx(whole[0, 1, 7].item(), abs=1e-5)
    assert found[1].tolist()[1:] == [0.0, 0.0]
    assert math.isclose(found[1, 0].item(), whole[1, 0, 3].item(), abs_tol=1e-5)
