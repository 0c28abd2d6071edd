"""From settings to things: task, tokenizer, model, engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_roc import config
from grpo_roc.device import Device
from grpo_roc.engines.base import Engine
from grpo_roc.engines.local import LocalEngine
from grpo_roc.rollout import Codec
from grpo_roc.tasks.arith import Arith
from grpo_roc.tasks.base import Task
from grpo_roc.tasks.math_jsonl import MathJsonl


def task(settings: config.Config) -> Task:
    if settings.task.kind == "arith":
        return Arith(settings.task, settings.chat)
    return MathJsonl(settings.task, settings.chat)


def tokenizer(folder: str | Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


def codec(settings: config.Config, its_tokenizer: Any) -> Codec:
    return Codec(its_tokenizer, settings.chat.system, settings.chat.opening)


def model(folder: str | Path, settings: config.Model, device: Device) -> Any:
    """In fp32: AdamW's steps are smaller than what bf16 resolves. On a GPU, FSDP computes in bf16."""
    made = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation=settings.attn)
    if settings.grad_ckpt:
        made.gradient_checkpointing_enable()
    return made.to(device.torch)


def engines(settings: config.Config, folder: str | Path, weights: Mapping[str, torch.Tensor]) -> list[Engine]:
    made: list[Engine] = []
    for one in settings.engines:
        for url in expand(one.url):
            made.append(_engine(one, url, folder, weights, len(made)))
    return made


def _engine(one: config.Engine, url: str, folder: str | Path, weights: Mapping[str, torch.Tensor], number: int) -> Engine:
    if one.kind == "local":
        return LocalEngine(AutoConfig.from_pretrained(str(folder)), weights, one, f"local-{number}")
    if one.kind == "vllm":
        from grpo_roc.engines.vllm import VllmEngine

        return VllmEngine(url)
    from grpo_roc.engines.sglang import SglangEngine

    return SglangEngine(url)


def expand(url: str) -> list[str]:
    """`http://host:3000{0..3}` is four addresses."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", url)
    if not found:
        return [url]
    return [url[: found.start()] + str(n) + url[found.end() :] for n in range(int(found[1]), int(found[2]) + 1)]
