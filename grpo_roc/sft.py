"""Supervised start: format and tool use from demonstrations. The loss counts what the model says, not what it hears."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_roc import config
from grpo_roc.policy import logprobs, pad
from grpo_roc.rollout import Codec
from grpo_roc.tasks.base import Segment, Task

Example = tuple[list[int], list[int]]  # ids, mask


def encode(codec: Codec, segments: Sequence[Segment], max_len: int) -> Example:
    ids: list[int] = []
    mask: list[int] = []
    for segment in segments:
        part = codec.ids(segment.text)
        ids += part
        mask += [int(segment.learned)] * len(part)
    return ids[:max_len], mask[:max_len]


def learning_rate(step: int, steps: int, settings: config.Sft) -> float:
    """Linear warm-up, then a cosine down to `final_lr`."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, steps - settings.warmup)
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: Any,
    codec: Codec,
    task: Task,
    settings: config.Sft,
    *,
    seed: int,
    max_len: int,
    first_step: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    report: Callable[[int, dict[str, float]], None] = lambda step, row: None,
) -> torch.optim.Optimizer:
    """`settings.steps` steps; each step's examples follow from (seed, step)."""
    device = next(model.parameters()).device
    optimizer = optimizer or torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    model.train()
    for step in range(first_step, settings.steps):
        lr = learning_rate(step, settings.steps, settings)
        for group in optimizer.param_groups:
            group["lr"] = lr
        examples = [encode(codec, one, max_len) for one in task.demonstrations(seed, step, settings.batch)]
        examples.sort(key=lambda example: len(example[0]))  # neighbours of like length: little padding
        learned = sum(sum(mask[1:]) for _, mask in examples)
        total = 0.0
        for first in range(0, len(examples), settings.micro):
            loss = _loss(model, examples[first : first + settings.micro], device) / learned
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(ids) for ids, _ in examples)
        report(step, {"sft/loss": total, "sft/lr": lr, "sft/grad_norm": float(norm), "sft/tokens": float(tokens)})
    return optimizer


def _loss(model: Any, examples: Sequence[Example], device: torch.device) -> Tensor:
    ids = pad([ids for ids, _ in examples]).to(device)
    mask = pad([mask for _, mask in examples]).to(device)
    return -logprobs(model, ids, mask).sum()
