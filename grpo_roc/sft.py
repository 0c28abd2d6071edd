"""Supervised start: the model learns format and tool use from demonstrations. Only the assistant's own tokens are learned."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from grpo_roc import checkpoint, config, metrics, sharded
from grpo_roc.distributed import Ranks, use_device
from grpo_roc.loss import logprobs, pad
from grpo_roc.model import load_tokenizer, make_optimizer
from grpo_roc.rollout import Codec
from grpo_roc.tasks import make_task
from grpo_roc.tasks.base import Segment

CHECKPOINT_EVERY = 200
Example = tuple[list[int], list[int]]  # ids, mask


def run_sft(settings: config.Config, start: Path, out: Path, *, seed: int = 0) -> Path:
    """Train the model in `start`, or resume from `out/latest`; the result is in `out/model`.

    The examples of a step depend on (seed, step) alone: every rank makes them all and learns from its share.
    """
    ranks = Ranks(settings.parallel, use_device(settings))
    latest = sharded.find_latest(out, ranks)
    state = checkpoint.load_state(latest, settings) if latest else checkpoint.State()
    tokenizer, task = load_tokenizer(start), make_task(settings)
    codec = Codec(tokenizer, settings.chat)
    model = sharded.open_model(latest or start, settings.model, ranks).train()
    optimizer = make_optimizer(model, settings.sft)
    if latest:
        sharded.load_optimizer(latest, model, optimizer, ranks)
    log = metrics.Metrics(out, first_step=state.step, board=False) if ranks.is_main else None
    steps = settings.sft.steps
    bar = tqdm(range(state.step, steps), "sft", steps, initial=state.step, unit="step", disable=not ranks.is_main)
    for step in bar:
        examples = [encode(codec, one, settings.max_len) for one in task.demonstrations(seed, step, settings.sft.batch)]
        row = _train_step(model, optimizer, examples, settings, step, ranks)
        bar.set_postfix_str(f"loss {row['sft/loss']:.3f} lr {row['sft/lr']:.1e}")
        if log is not None and (step % settings.sft.log_every == 0 or step + 1 == steps):
            log.add({"step": step} | row)
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            name, kept = ("latest", optimizer) if step + 1 < steps else ("model", None)
            sharded.save(out / name, ranks, model, kept, tokenizer, checkpoint.State(step + 1), settings)
    return out / "model"


def _train_step(
    model: Any, optimizer: torch.optim.Optimizer, examples: list[Example], settings: config.Config, step: int, ranks: Ranks
) -> dict[str, float]:
    lr, micro = learning_rate(step, settings.sft), settings.sft.micro
    for group in optimizer.param_groups:
        group["lr"] = lr
    examples.sort(key=lambda example: len(example[0]))  # batches of similar length need little padding
    learned = sum(sum(mask[1:]) for _, mask in examples)
    total = 0.0
    for part, weight in ranks.share([examples[first : first + micro] for first in range(0, len(examples), micro)]):
        loss = _loss(model, part, settings.model.logit_rows, ranks.device.torch) / learned * weight
        (loss * ranks.loss_scale).backward()
        total += loss.item()
    norm = ranks.apply_gradients(model, optimizer, 1.0)
    tokens = sum(len(ids) for ids, _ in examples)
    return {"sft/loss": ranks.sum([total])[0], "sft/lr": lr, "sft/grad_norm": norm, "sft/tokens": float(tokens)}


def _loss(model: Any, examples: Sequence[Example], logit_rows: int, device: torch.device) -> Tensor:
    ids, mask = pad([ids for ids, _ in examples]), pad([mask for _, mask in examples])
    return -logprobs(model, ids.to(device), mask.to(device), logit_rows=logit_rows).sum()


def encode(codec: Codec, segments: Sequence[Segment], max_len: int) -> Example:
    ids: list[int] = []
    mask: list[int] = []
    for segment in segments:
        part = codec.ids(segment.text)
        ids += part
        mask += [int(segment.learned)] * len(part)
    return ids[:max_len], mask[:max_len]


def learning_rate(step: int, settings: config.Sft) -> float:
    """Linear warm-up, then a cosine down to `final_lr`."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))
