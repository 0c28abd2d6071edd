"""Device, model, engine and service in one round trip each; says what works and what to do about the rest."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_roc import build, config, runs
from grpo_roc import model as tiny
from grpo_roc.device import pick
from grpo_roc.engines.base import Engine, Sampling
from grpo_roc.env import service_url, tool_env
from grpo_roc.policy import logprobs


def run(settings: config.Config, *, need_gpu: bool) -> int:
    checks: dict[str, Callable[[], str]] = {
        "torch": lambda: f"{torch.__version__}, HIP {torch.version.hip}, CUDA {torch.version.cuda}",
        "device": lambda: _device(settings, need_gpu),
        "one forward and backward pass": lambda: _learn(settings),
        "engines": lambda: asyncio.run(_engines(settings)),
        "service": lambda: asyncio.run(_service(settings)),
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}")
        except Exception as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}")
    return 1 if failed else 0


def _device(settings: config.Config, need_gpu: bool) -> str:
    device = pick(settings.model.dtype)
    if need_gpu and device.kind != "cuda":
        raise RuntimeError("torch sees no GPU; on ROCm look at HIP_VISIBLE_DEVICES and /dev/kfd, and docs/rocm.md")
    return str(device)


def _learn(settings: config.Config) -> str:
    device = pick(settings.model.dtype)
    model = tiny.make_model(config.Model(), 64, 64, 0).to(device.torch)
    with torch.autocast(device.kind, device.dtype, enabled=device.dtype != torch.float32):
        loss = -logprobs(
            model, torch.ones(2, 8, dtype=torch.long, device=device.torch), torch.ones(2, 8, device=device.torch)
        ).sum()
    loss.backward()
    return f"loss {float(loss):.2f}"


async def _engines(settings: config.Config) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.model.path) if settings.model.path else Path(folder)
        local = [engine for engine in settings.engines if engine.kind == "local"]
        if not settings.model.path:
            runs.make_tiny(settings, path)
        weights = build.model(path, settings.model, pick()).state_dict() if local else {}
        return ", ".join([await _ask(engine) for engine in build.engines(settings, path, weights)])


async def _ask(engine: Engine) -> str:
    try:
        generated = await engine.generate("doctor", [1, 2, 3], Sampling(4))
        await engine.release("doctor")
        load = await engine.load()
    finally:
        await engine.aclose()
    return f"{engine.name}: {len(generated.ids)} tokens, cache for {load.capacity:,}"


async def _service(settings: config.Config) -> str:
    from grpo_roc.chat import ToolCall

    with service_url(settings.service) as url:
        async with tool_env(settings, url, noise=config.Noise()) as env:
            heard = await env.run(ToolCall("print(6 * 7)"))
            reward = await env.reward("<answer>\\boxed{42}</answer>", "42")
    if heard.text != "42" or reward != 1.0:
        raise RuntimeError(f"print(6 * 7) gave {heard}, and the answer 42 the reward {reward}")
    return f"{url}: a call in {1000 * heard.wait_s:.0f} ms, an answer verified"
