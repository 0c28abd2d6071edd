"""The clipped policy-gradient loss on generated tokens, and the log-probabilities it needs. No KL, no entropy term."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

ENTROPY_ROWS = 512
Norm = Literal["batch", "group", "seq"]


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
    """(B, longest), padded at the end, where causal attention hides the padding from all real tokens."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def logprobs(model: Any, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """(B, T-1): log-probability of each next token where mask (B, T) is 1, else 0."""
    return logprobs_and_entropies(model, ids, mask, temperature)[0]


def logprobs_and_entropies(model: Any, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Both (B, T-1), 0 where mask (B, T) is 0; the entropies, in nats, have no gradient."""
    wanted = mask[:, 1:].bool()
    every = torch.log_softmax(_logits_where(model, ids[:, :-1], wanted) / temperature, -1)
    chosen = every.gather(1, ids[:, 1:][wanted][:, None])[:, 0]
    with torch.no_grad():  # in parts: the vocabulary is large
        entropies = torch.cat([-(part.exp() * part).sum(-1) for part in every.split(ENTROPY_ROWS)])
    zeros = torch.zeros(wanted.shape, device=ids.device)
    return zeros.masked_scatter(wanted, chosen), zeros.masked_scatter(wanted, entropies)


def _logits_where(model: Any, ids: Tensor, wanted: Tensor) -> Tensor:
    """(N, V): logits after each position of `ids` (B, T) where `wanted` is true."""
    if hasattr(model, "unshard"):  # only the whole model's forward gathers sharded parameters
        return model(input_ids=ids).logits[wanted].float()
    hidden = model.model(input_ids=ids).last_hidden_state
    return model.lm_head(hidden[wanted]).float()  # the vocabulary is large, and most tokens are not learned


class Loss(NamedTuple):
    value: Tensor
    ratio_sum: float
    clipped_low: float
    clipped_high: float
    tokens: float


def row_weights(tokens: Sequence[int], groups: Sequence[int], norm: Norm) -> list[float]:
    """The weight of one token of each row. Over the whole batch (all ranks and micro-batches) the weights sum to 1.

    batch: equal per token. group: equal per prompt and within it per token (equation 6). seq: equal per rollout.
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
    logprobs: Tensor,  # (B, T) of the trained policy
    old: Tensor,  # (B, T) of the policy before the update
    mask: Tensor,  # (B, T) 1 for generated tokens
    advantages: Tensor,  # (B,)
    weights: Tensor,  # (B,) per token, see `row_weights`
    clip: tuple[float, float],
    importance: Tensor | None = None,  # (B, T) truncated ratio of the trainer's to the engine's probabilities
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


class Mismatch(NamedTuple):
    """How far the engine's log-probabilities are from the trainer's with the same weights: sums over tokens, and a maximum."""

    kl: float  # KL(engine || trainer), estimated at the sampled tokens by r - 1 - log r
    absolute: float
    capped: float  # tokens whose importance weight is cut
    largest: float


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor, cap: float) -> Mismatch:
    difference = (trainer.detach() - engine) * mask
    ratio = torch.exp(difference)
    capped = float(((ratio > cap) & (mask > 0)).sum()) if cap else 0.0
    distance = difference.abs()
    return Mismatch(float((ratio - 1 - difference).sum()), float(distance.sum()), capped, float(distance.max()))
