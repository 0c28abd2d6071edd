"""Check device, memory, engines and service before a run; `--full` also compares them with the trainer and with the hardware.

Each line is ok, FAIL or skipped, with the figures or the reason. The lines are printed and written to a Markdown report.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from grpo_roc import checks, config, metrics
from grpo_roc.chat import ToolCall
from grpo_roc.checks import Setup, Skip
from grpo_roc.distributed import pick_device
from grpo_roc.engines.base import Engine, Sampling
from grpo_roc.env import service_url, tool_env
from grpo_roc.loss import logprobs
from grpo_roc.model import make_model, make_tiny


class Line(NamedTuple):
    status: str  # ok, FAIL, skipped
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:8}{self.name}: {self.text}"


def run(
    settings: config.Config,
    *,
    need_gpu: bool,
    full: bool = False,
    model: Path | None = None,
    ranks: int | None = None,
    report: Path | None = None,
) -> int:
    """Run the checks and return the exit code: 0 if none failed, else 1.

    `ranks` is the number of ranks of the planned run. Without it, torchrun's number is used, or one rank per GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = model or Path(settings.model.path or folder)
        if path == Path(folder):
            make_tiny(settings, path)
        setup = Setup(settings, path, ranks or _ranks(settings))
        lines = []
        for name, check in (_checks(setup, need_gpu) | (_full(setup) if full else {})).items():
            lines.append(_line(name, check))
            print(lines[-1], flush=True)
    if report is not None:
        report.write_text(_report(settings, lines))
        print(f"report: {report}")
    return 1 if any(line.status == "FAIL" for line in lines) else 0


def _ranks(settings: config.Config) -> int:
    if settings.parallel.kind == "none":
        return 1
    return int(os.environ.get("WORLD_SIZE", "0")) or max(1, torch.cuda.device_count())


def _line(name: str, check: Callable[[], str]) -> Line:
    try:
        return Line("ok", name, check())
    except Skip as reason:
        return Line("skipped", name, str(reason))
    except Exception as error:
        return Line("FAIL", name, f"{type(error).__name__}: {error}")


def _report(settings: config.Config, lines: list[Line]) -> str:
    rows = [[line.name, line.status, " ".join(line.text.split()).replace("|", "/")] for line in lines]
    return "\n".join([f"# Doctor: {settings.name}", "", *metrics.table(["check", "status", "found"], rows, 3), ""])


def _checks(setup: Setup, need_gpu: bool) -> dict[str, Callable[[], str]]:
    return {
        "torch": lambda: f"{torch.__version__}, HIP {torch.version.hip}, CUDA {torch.version.cuda}",
        "device": lambda: _device(setup.settings, need_gpu),
        "one forward and backward pass": lambda: _learn(setup.settings),
        "memory forecast": lambda: checks.fits(setup),
        "engines": lambda: asyncio.run(setup.each_engine(_generate)),
        "service": lambda: asyncio.run(_service(setup.settings)),
    }


def _full(setup: Setup) -> dict[str, Callable[[], str]]:
    return {
        "log-probabilities of engine and trainer": lambda: asyncio.run(setup.each_engine(checks.parity)),
        "weights to the engine and back": lambda: asyncio.run(setup.each_engine(checks.round_trip)),
        "collectives": lambda: checks.collective_bandwidth(setup),
        "generation speed": lambda: asyncio.run(setup.each_engine(checks.speed)),
        "memory of an update": lambda: checks.memory(setup),
    }


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
    return f"loss {float(loss.detach()):.2f}"


async def _generate(setup: Setup, engine: Engine) -> str:
    generated = await engine.generate("doctor", [1, 2, 3], Sampling(4))
    await engine.release("doctor")
    load = await engine.load()
    return f"{len(generated.ids)} tokens, cache for {load.capacity:,}"


async def _service(settings: config.Config) -> str:
    with service_url(settings.service) as url:
        async with tool_env(settings, url, noise=config.Noise()) as env:
            observation = await env.run(ToolCall("print(6 * 7)"))
            reward = await env.reward("<answer>\\boxed{42}</answer>", "42")
    if observation.text != "42" or reward != 1.0:
        raise RuntimeError(f"print(6 * 7) returned {observation}, and the answer 42 got the reward {reward}")
    return f"{url}: a call in {1000 * observation.wait_s:.0f} ms, an answer verified"
