"""The learner: selected rollouts become micro-batches, and micro-batches one update of the model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.distributed import Ranks
from grpo_roc.loss import (
    Mismatch,
    Norm,
    logprobs_and_entropies,
    mismatch,
    pad,
    policy_loss,
    row_weights,
    truncated_importance,
)
from grpo_roc.model import make_optimizer


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
    ids: Tensor  # (B, T)
    mask: Tensor
    engine: Tensor  # (B, T) log-probabilities
    advantages: Tensor  # (B,)
    weights: Tensor  # (B,)


def micro_batches(samples: Sequence[Sample], norm: Norm, budget: int, world: int) -> list[MicroBatch]:
    """Batches of samples of similar length, up to `budget` padded tokens each; their number is a multiple of `world`."""
    weights = row_weights([one.tokens for one in samples], [one.group for one in samples], norm)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    parts: list[list[int]] = [[]]
    for index in order:
        if parts[-1] and (len(parts[-1]) + 1) * len(samples[index].ids) > budget:
            parts.append([])
        parts[-1].append(index)
    made = [_micro_batch([samples[i] for i in part], [weights[i] for i in part]) for part in parts]
    while len(made) % world:  # forward passes of a sharded model are collective: every rank needs the same number
        made.append(_micro_batch([samples[order[0]]], [0.0]))
    return made


def _micro_batch(samples: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
    return MicroBatch(
        pad([one.ids for one in samples]),
        pad([one.mask for one in samples]),
        pad([one.logprobs for one in samples], torch.float32),
        torch.tensor([one.advantage for one in samples]),
        torch.tensor(weights),
    )


class Learner:
    """The model, its optimizer, and the update."""

    def __init__(self, model: Any, settings: config.Rl, ranks: Ranks) -> None:
        self.model, self._settings, self.ranks = model, settings, ranks
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        self.optimizer = make_optimizer(self.model, self._settings)

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Take `updates_per_rollout` optimizer steps on the same rollouts; the clip can act from the second one on."""
        settings, ranks = self._settings, self.ranks
        every = micro_batches(samples, settings.loss_norm, settings.micro_tokens, ranks.world)
        own = [MicroBatch(*(part.to(ranks.device.torch) for part in one)) for one in every[ranks.rank :: ranks.world]]
        self.model.train()
        old: list[Tensor | None] = [None] * len(own)
        if settings.updates_per_rollout > 1:  # else the first forward pass below gives them
            with torch.no_grad():
                old = [self._forward(one)[0] for one in own]
        lr = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums, largest, norm = [0.0] * 9, 0.0, 0.0
        for number in range(settings.updates_per_rollout):
            for one, before in zip(own, old, strict=True):
                loss, seen = self._backward(one, before)
                difference, entropy = seen if number == 0 else _NOTHING
                sums = [a + b for a, b in zip(sums, [*loss, *difference[:3], entropy], strict=True)]
                largest = max(largest, difference.largest)
            ranks.sum_gradients(self.model)
            norm = _number(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        value, ratio, low, high, tokens, kl, absolute, capped, entropy = ranks.sum(sums)
        rolled = max(1.0, tokens / settings.updates_per_rollout)
        return {
            "train/loss": value,
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/ratio_mean": ratio / max(1.0, tokens),
            "train/clip_frac_low": low / max(1.0, tokens),
            "train/clip_frac_high": high / max(1.0, tokens),
            "train/tokens": tokens / settings.updates_per_rollout,
            "train/rows": len(samples),
            "train/entropy": entropy / rolled,
            "mismatch/kl": kl / rolled,
            "mismatch/mean": absolute / rolled,
            "mismatch/max": ranks.max(largest),
            "mismatch/capped": capped / rolled,
        }

    def _forward(self, one: MicroBatch) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropies(self.model, one.ids, one.mask, self._settings.temperature)

    def _backward(self, one: MicroBatch, before: Tensor | None) -> tuple[list[float], tuple[Mismatch, float]]:
        """The parts of `Loss`; and the mismatch and the sum of entropies."""
        cap = self._settings.is_cap
        now, entropies = self._forward(one)
        old = now.detach() if before is None else before
        mask, engine = one.mask[:, 1:].float(), one.engine[:, 1:]
        importance = truncated_importance(old, engine, mask, cap) if cap else None
        loss = policy_loss(now, old, mask, one.advantages, one.weights, self._settings.clip, importance)
        (loss.value * self.ranks.loss_scale).backward()
        if not one.weights.sum() > 0:  # batches that only fill up a rank's share do not count
            return [0.0] * len(loss), _NOTHING
        seen = mismatch(old, engine, mask, cap), float(entropies.sum())
        return [float(loss.value.detach()), *loss[1:]], seen


_NOTHING = (Mismatch(0.0, 0.0, 0.0, 0.0), 0.0)


def _number(value: Any) -> float:
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
