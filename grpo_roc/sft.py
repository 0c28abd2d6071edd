"""Supervised start: the model learns format and tool use from demonstrations. Only the assistant's own tokens are learned."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from grpo_roc import checkpoint, config, metrics
from grpo_roc.distributed import use_device
from grpo_roc.loss import logprobs, pad
from grpo_roc.model import load_model, load_tokenizer, make_optimizer
from grpo_roc.rollout import Codec
from grpo_roc.tasks import make_task
from grpo_roc.tasks.base import Segment

CHECKPOINT_EVERY = 200
Example = tuple[list[int], list[int]]  # ids, mask


def run_sft(settings: config.Config, start: Path, out: Path, *, seed: int = 0) -> Path:
    """Train the model in `start`, or resume from `out/latest`; the result is in `out/model`.

    The examples of a step depend on (seed, step) alone.
    """
    latest = checkpoint.latest(out / "latest")
    state = checkpoint.load_state(latest, settings) if latest else checkpoint.State()
    tokenizer, task = load_tokenizer(start), make_task(settings)
    codec = Codec(tokenizer, settings.chat)
    model = load_model(latest or start, settings.model, use_device(settings)).train()
    optimizer = make_optimizer(model, settings.sft)
    if latest:
        optimizer.load_state_dict(checkpoint.load_optimizer(latest))
    log = metrics.Metrics(out, first_step=state.step, board=False)
    steps = settings.sft.steps
    for step in (bar := tqdm(range(state.step, steps), total=steps, initial=state.step, desc="sft", unit="step")):
        examples = [encode(codec, one, settings.max_len) for one in task.demonstrations(seed, step, settings.sft.batch)]
        row = _train_step(model, optimizer, examples, settings.sft, step)
        bar.set_postfix_str(f"loss {row['sft/loss']:.3f} lr {row['sft/lr']:.1e}")
        if step % settings.sft.log_every == 0 or step + 1 == steps:
            log.add({"step": step} | row)
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            folder = out / ("latest" if step + 1 < steps else "model")
            state = checkpoint.State(step + 1)
            checkpoint.save(folder, model.config, model.state_dict(), tokenizer, optimizer.state_dict(), state, settings)
    return out / "model"


def _train_step(
    model: Any, optimizer: torch.optim.Optimizer, examples: list[Example], settings: config.Sft, step: int
) -> dict[str, float]:
    lr = learning_rate(step, settings)
    for group in optimizer.param_groups:
        group["lr"] = lr
    examples.sort(key=lambda example: len(example[0]))  # batches of similar length need little padding
    learned = sum(sum(mask[1:]) for _, mask in examples)
    total = 0.0
    for first in range(0, len(examples), settings.micro):
        loss = _loss(model, examples[first : first + settings.micro]) / learned
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tokens = sum(len(ids) for ids, _ in examples)
    return {"sft/loss": total, "sft/lr": lr, "sft/grad_norm": float(norm), "sft/tokens": float(tokens)}


def _loss(model: Any, examples: Sequence[Example]) -> Tensor:
    ids, mask = pad([ids for ids, _ in examples]), pad([mask for _, mask in examples])
    return -logprobs(model, ids.to(model.device), mask.to(model.device)).sum()


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
