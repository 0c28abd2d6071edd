"""The clipped policy-gradient loss on the tokens that the model said. No KL, no entropy term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["batch", "group", "seq"]


class Loss(NamedTuple):
    value: Tensor
    ratio_sum: float
    clipped_low: float
    clipped_high: float
    tokens: float


def row_weights(tokens: Sequence[int], groups: Sequence[int], norm: Norm) -> list[float]:
    """What one token of each row weighs; over the whole batch, of all ranks and micro-batches, the weights sum to 1.

    batch: every token alike. group: every prompt alike, and its tokens alike (equation 6). seq: every rollout alike.
    """
    if norm == "batch":
        return [1 / max(1, sum(tokens))] * len(tokens)
    if norm == "seq":
        return [1 / (len(tokens) * max(1, count)) for count in tokens]
    totals: dict[int, int] = {}
    for count, group in zip(tokens, groups, strict=True):
        totals[group] = totals.get(group, 0) + count
    return [1 / (len(totals) * max(1, totals[group])) for group in groups]


def policy_loss(
    logprobs: Tensor,  # (B, T) of the policy that is trained
    old: Tensor,  # (B, T) of the policy at the start of the update
    mask: Tensor,  # (B, T) 1 where the model spoke
    advantages: Tensor,  # (B,)
    weights: Tensor,  # (B,) of a token, see `row_weights`
    clip: tuple[float, float],
    importance: Tensor | None = None,  # (B, T) of the trainer's against the engine's probabilities, truncated
) -> Loss:
    ratio = torch.exp((logprobs - old) * mask)
    low, high = 1 - clip[0], 1 + clip[1]
    gain = advantages[:, None] * ratio
    bounded = advantages[:, None] * ratio.clamp(low, high)
    token_loss = -torch.minimum(gain, bounded)
    if importance is not None:
        token_loss = token_loss * importance
    value = (token_loss * mask * weights[:, None]).sum()
    with torch.no_grad():
        active = (bounded < gain) & (mask > 0)
        return Loss(
            value,
            float((ratio * mask).sum()),
            float((active & (ratio < low)).sum()),
            float((active & (ratio > high)).sum()),
            float(mask.sum()),
        )


def truncated_importance(trainer: Tensor, engine: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap) for each token."""
    return torch.exp((trainer - engine) * mask).clamp(max=cap)
