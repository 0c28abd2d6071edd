"""The clipped policy-gradient loss on generated tokens, and the log-probabilities it needs. No KL, no entropy term."""

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

LOGIT_ROWS = 2048
Norm = Literal["batch", "group", "seq"]


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
    """(B, longest), padded at the end, where causal attention hides the padding from all real tokens."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def logprobs(model: Any, ids: Tensor, mask: Tensor, temperature: float = 1.0, *, logit_rows: int = LOGIT_ROWS) -> Tensor:
    """(B, T-1): log-probability of each next token where mask (B, T) is 1, else 0."""
    return logprobs_and_entropies(model, ids, mask, temperature, logit_rows=logit_rows)[0]


def logprobs_and_entropies(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    *,
    positions: Tensor | None = None,  # (B, T) that start at 0 again at every sample of a packed row
    logit_rows: int = LOGIT_ROWS,  # the most tokens whose logits are in memory at once; 0: all
) -> tuple[Tensor, Tensor]:
    """Both (B, T-1), 0 where mask (B, T) is 0; the entropies, in nats, have no gradient."""
    wanted = mask[:, 1:].bool()
    before = None if positions is None else positions[:, :-1]
    read = getattr(model, _READ, None) or partial(_read_where, model)
    found = read(ids[:, :-1], before, wanted, ids[:, 1:][wanted], temperature, logit_rows)
    zeros = torch.zeros(wanted.shape, device=ids.device)
    chosen, entropies = (zeros.masked_scatter(wanted, one) for one in found)
    return chosen, entropies


_READ = "read_where"


def register_forward(model: Any) -> None:
    """A sharded model gathers its parameters for `_read_where` as it does for its own forward pass."""
    setattr(model, _READ, MethodType(_read_where, model))
    register_fsdp_forward_method(model, _READ)


def _read_where(
    model: Any, ids: Tensor, positions: Tensor | None, wanted: Tensor, targets: Tensor, temperature: float, logit_rows: int
) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities of `targets` and entropies after each position of `ids` (B, T) where `wanted` is true.

    The vocabulary is large: the output layer reads only wanted positions, `logit_rows` at a time. If there are more, their
    logits are not kept but computed again in the backward pass.
    """
    # With a cache, the model would not separate the samples of a packed row.
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[wanted]
    read = partial(_read_part, model.lm_head, temperature)
    rows = logit_rows or max(1, len(hidden))
    if len(hidden) > rows and torch.is_grad_enabled():
        read = partial(checkpoint, read, use_reentrant=False)
    parts = [read(*part) for part in zip(hidden.split(rows), targets.split(rows), strict=True)]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _read_part(head: Any, temperature: float, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(head(hidden).float() / temperature, -1)
    chosen = every.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        return chosen, -(every.exp() * every).sum(-1)


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
    advantages: Tensor,  # (B, T), or (B, 1) if a row is one sample
    weights: Tensor,  # (B, T) or (B, 1), see `row_weights`
    clip: tuple[float, float],
    importance: Tensor | None = None,  # (B, T) truncated ratio of the trainer's to the engine's probabilities
) -> Loss:
    ratio = torch.exp((logprobs - old) * mask)
    low, high = 1 - clip[0], 1 + clip[1]
    gain = advantages * ratio
    bounded = advantages * ratio.clamp(low, high)
    token_loss = -torch.minimum(gain, bounded)
    if importance is not None:
        token_loss = token_loss * importance
    value = (token_loss * mask * weights).sum()
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
