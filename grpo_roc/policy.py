"""The model as the trainer sees it: log-probabilities of tokens that were said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
    """(B, longest); padding stands at the end, where causal attention hides it from everything that counts."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def logits_where(model: Any, ids: Tensor, wanted: Tensor) -> Tensor:
    """(N, V): what follows each position of `ids` (B, T) where `wanted` is true."""
    if hasattr(model, "unshard"):  # sharded parameters are gathered by the whole model's forward only
        return model(input_ids=ids).logits[wanted].float()
    hidden = model.model(input_ids=ids).last_hidden_state
    return model.lm_head(hidden[wanted]).float()  # the vocabulary is large, and most tokens are not learned


def logprobs(model: Any, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """(B, T-1): log-probability of each next token where mask (B, T) says that it counts, else 0."""
    wanted = mask[:, 1:].bool()
    logits = logits_where(model, ids[:, :-1], wanted) / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[:, 1:][wanted][:, None])[:, 0]
    return torch.zeros(wanted.shape, device=ids.device).masked_scatter(wanted, chosen)
