"""Selected rollouts become micro-batches: padded rows of similar length, or rows that each hold several samples (packing)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_roc.loss import Norm, pad, row_weights


class Sample(NamedTuple):
    """A selected rollout, as the update needs it."""

    ids: list[int]  # prompt and response
    mask: list[int]
    logprobs: list[float]  # of the engine
    advantage: float
    group: int

    @property
    def tokens(self) -> int:
        return sum(self.mask)


class MicroBatch(NamedTuple):
    """All (B, T)."""

    ids: Tensor
    mask: Tensor
    engine: Tensor  # log-probabilities
    advantages: Tensor
    weights: Tensor  # of each token
    numbers: Tensor  # of the token's sample
    positions: Tensor | None = None  # None: one sample per row. Else they start at 0 again at every sample

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(*(None if part is None else part.to(device) for part in self))


def micro_batches(samples: Sequence[Sample], norm: Norm, budget: int, world: int, *, packing: bool = False) -> list[MicroBatch]:
    """Batches of up to `budget` tokens each, padding included; their number is a multiple of `world`."""
    weights = row_weights([one.tokens for one in samples], [one.group for one in samples], norm)
    lengths = [len(one.ids) for one in samples]
    parts = fill_rows(lengths, budget) if packing else _by_length(lengths, budget)
    make = _packed if packing else _padded
    made = [make([samples[i] for i in part], [weights[i] for i in part], part) for part in parts]
    while len(made) % world:  # forward passes of a sharded model are collective: every rank needs the same number
        made.append(_padded([min(samples, key=lambda one: len(one.ids))], [0.0], [0]))
    return made


def _by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Samples of similar length together, which saves padding."""
    parts: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if parts[-1] and (len(parts[-1]) + 1) * lengths[index] > budget:
            parts.append([])
        parts[-1].append(index)
    return parts


def fill_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of at most `budget` tokens: the longest sample first, each into the first row with room.

    A sample of more than `budget` tokens gets a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((number for number, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _padded(samples: Sequence[Sample], weights: Sequence[float], numbers: Sequence[int]) -> MicroBatch:
    ids = pad([one.ids for one in samples])
    return MicroBatch(
        ids,
        pad([one.mask for one in samples]),
        pad([one.logprobs for one in samples], torch.float32),
        torch.tensor([one.advantage for one in samples])[:, None].expand(ids.shape),
        torch.tensor(weights)[:, None].expand(ids.shape),
        torch.tensor(numbers)[:, None].expand(ids.shape),
    )


def _packed(samples: Sequence[Sample], weights: Sequence[float], numbers: Sequence[int]) -> MicroBatch:
    """One row. Nothing is learned at the first token of a sample: the token before it is of another."""
    lengths = torch.tensor([len(one.ids) for one in samples])
    return MicroBatch(
        torch.tensor([[token for one in samples for token in one.ids]]),
        torch.tensor([[own for one in samples for own in (0, *one.mask[1:])]]),
        torch.tensor([[value for one in samples for value in one.logprobs]], dtype=torch.float32),
        torch.tensor([one.advantage for one in samples]).repeat_interleave(lengths)[None],
        torch.tensor(weights).repeat_interleave(lengths)[None],
        torch.tensor(numbers).repeat_interleave(lengths)[None],
        torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
    )
