"""The learner: selected rollouts become one update of the model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.batches import MicroBatch, Sample, micro_batches
from grpo_roc.distributed import Ranks
from grpo_roc.loss import (
    LOGIT_ROWS,
    Mismatch,
    logprobs_and_entropies,
    mismatch,
    policy_loss,
    truncated_importance,
)
from grpo_roc.model import make_optimizer


class Learner:
    """The model, its optimizer, and the update."""

    def __init__(self, model: Any, settings: config.Rl, ranks: Ranks, logit_rows: int = LOGIT_ROWS) -> None:
        self.model, self._settings, self.ranks, self._logit_rows = model, settings, ranks, logit_rows
        self.reset_optimizer()
        self._count = 0
        self._entropies: list[tuple[Tensor, Tensor]] = []  # number of the sample, entropy: of each generated token

    def take_entropies(self) -> list[list[float]]:
        """Of the generated tokens of each sample, from the last update's first forward pass; on rank 0 only. Collective."""
        found: list[list[float]] = [[] for _ in range(self._count)]
        for numbers, entropies in (pair for part in self.ranks.gather(self._entropies) for pair in part):
            for number, entropy in zip(numbers.tolist(), entropies.tolist(), strict=True):
                found[number].append(entropy)
        self._count, self._entropies = 0, []
        return found

    def reset_optimizer(self) -> None:
        self.optimizer = make_optimizer(self.model, self._settings)

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, Any]:
        """Take `updates_per_rollout` optimizer steps on the same rollouts; the clip can act from the second one on."""
        settings, ranks = self._settings, self.ranks
        every = micro_batches(samples, settings.loss_norm, settings.micro_tokens, ranks.world, packing=settings.packing)
        own = [one.to(ranks.device.torch) for one in every[ranks.rank :: ranks.world]]
        self.model.train()
        old: list[Tensor | None] = [None] * len(own)
        if settings.updates_per_rollout > 1:  # else the first forward pass below gives them
            with torch.no_grad():
                old = [self._forward(one)[0] for one in own]
        lr = settings.lr * min(1.0, (step + 1) / max(1, settings.warmup))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums, largest, norm = [0.0] * 9, 0.0, 0.0
        self._count, self._entropies = len(samples), []
        for number in range(settings.updates_per_rollout):
            for one, before in zip(own, old, strict=True):
                loss, seen = self._backward(one, before, first=number == 0)
                difference, entropy = seen if number == 0 else _NOTHING
                sums = [a + b for a, b in zip(sums, [*loss, *difference[:3], entropy], strict=True)]
                largest = max(largest, difference.largest)
            norm = ranks.apply_gradients(self.model, self.optimizer, settings.grad_clip)
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
        temperature, rows = self._settings.temperature, self._logit_rows
        return logprobs_and_entropies(self.model, one.ids, one.mask, temperature, positions=one.positions, logit_rows=rows)

    def _backward(self, one: MicroBatch, before: Tensor | None, *, first: bool) -> tuple[list[float], tuple[Mismatch, float]]:
        """The parts of `Loss`; and the mismatch and the sum of entropies."""
        cap = self._settings.is_cap
        now, entropies = self._forward(one)
        old = now.detach() if before is None else before
        mask, engine = one.mask[:, 1:].float(), one.engine[:, 1:]
        importance = truncated_importance(old, engine, mask, cap) if cap else None
        advantages, weights = one.advantages[:, 1:], one.weights[:, 1:]
        loss = policy_loss(now, old, mask, advantages, weights, self._settings.clip, importance)
        (loss.value * self.ranks.loss_scale).backward()
        if not one.weights.sum() > 0:  # batches that only fill up a rank's share do not count
            return [0.0] * len(loss), _NOTHING
        if first:
            self._entropies.append((one.numbers[:, 1:][mask > 0].cpu(), entropies[mask > 0].cpu()))
        seen = mismatch(old, engine, mask, cap), float(entropies.sum())
        return [float(loss.value.detach()), *loss[1:]], seen


_NOTHING = (Mismatch(0.0, 0.0, 0.0, 0.0), 0.0)
