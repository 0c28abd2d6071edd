"""Check device, model, engines and service with one round trip each."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_roc import config
from grpo_roc.chat import ToolCall
from grpo_roc.distributed import pick_device
from grpo_roc.engines import make_engines
from grpo_roc.engines.base import Engine, Sampling
from grpo_roc.env import service_url, tool_env
from grpo_roc.loss import logprobs
from grpo_roc.model import load_model, make_model, make_tiny


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
    device = pick_device(settings.model.dtype)
    if need_gpu and device.kind != "cuda":
        raise RuntimeError("torch sees no GPU; on ROCm check HIP_VISIBLE_DEVICES and /dev/kfd, see docs/rocm.md")
    return str(device)


def _learn(settings: config.Config) -> str:
    device = pick_device(settings.model.dtype)
    model = make_model(config.Model(), 64, 64, 0).to(device.torch)
    ids = torch.ones(2, 8, dtype=torch.long, device=device.torch)
    with torch.autocast(device.kind, device.dtype, enabled=device.dtype != torch.float32):
        loss = -logprobs(model, ids, ids).sum()
    loss.backward()
    return f"loss {float(loss):.2f}"


async def _engines(settings: config.Config) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.model.path or folder)
        if not settings.model.path:
            make_tiny(settings, path)
        local = any(engine.kind == "local" for engine in settings.engines)
        weights = load_model(path, settings.model, pick_device()).state_dict() if local else {}
        return ", ".join([await _generate(engine) for engine in make_engines(settings, path, weights)])


async def _generate(engine: Engine) -> str:
    try:
        generated = await engine.generate("doctor", [1, 2, 3], Sampling(4))
        await engine.release("doctor")
        load = await engine.load()
    finally:
        await engine.aclose()
    return f"{engine.name}: {len(generated.ids)} tokens, cache for {load.capacity:,}"


async def _service(settings: config.Config) -> str:
    with service_url(settings.service) as url:
        async with tool_env(settings, url, noise=config.Noise()) as env:
            observation = await env.run(ToolCall("print(6 * 7)"))
            reward = await env.reward("<answer>\\boxed{42}</answer>", "42")
    if observation.text != "42" or reward != 1.0:
        raise RuntimeError(f"print(6 * 7) returned {observation}, and the answer 42 got the reward {reward}")
    return f"{url}: a call in {1000 * observation.wait_s:.0f} ms, an answer verified"
