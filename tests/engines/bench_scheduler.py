"""Rollouts on two real vLLM servers with small KV caches, by the policies of the scheduler: `make bench-scheduler`.

A rollout has one to four turns, and waits for a tool between them. The lengths of its turns are drawn and enforced (no token
ends a turn), so every policy does the same work. Requests have no seed: vLLM for CPUs dies when it preempts one that has.
CPU seconds of the servers are given beside wall time, which depends on what else the machine does.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine_harness import SMOLLM2, Vllm

from grpo_roc import config
from grpo_roc.engines.base import Generated, Sampling
from grpo_roc.engines.http import total
from grpo_roc.engines.scheduler import Scheduler
from grpo_roc.engines.vllm import VllmEngine

BLOCK, BLOCKS = 32, 64  # of each KV cache: 2,048 tokens
PROMPT, GROUP, MAX_RESPONSE, OBSERVATION = 160, 8, 256, 24
LOADS = (16, 40, 80)  # rollouts
SEEDS = (0, 1)
ARMS = {
    "static": config.Scheduler(mode="static"),
    "least_inflight": config.Scheduler(mode="least_inflight"),
    "dynamic, safe": config.Scheduler(mode="dynamic", reserve="safe"),
    "dynamic, adaptive": config.Scheduler(mode="dynamic", reserve="adaptive"),
}


class Plan(NamedTuple):
    """What a rollout does, the same under every policy."""

    prompt: list[int]
    turns: list[int]  # generated tokens
    waits: list[float]  # seconds of tools


def plans(count: int, seed: int) -> list[Plan]:
    rng = random.Random(seed)
    found: list[Plan] = []
    for number in range(count):
        prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT)] if number % GROUP == 0 else found[-1].prompt
        turns, left = [], MAX_RESPONSE
        for _ in range(rng.choice((1, 2, 2, 3, 4))):
            turns.append(max(4, min(left - OBSERVATION, round(rng.lognormvariate(3.0, 0.7)))))
            left -= turns[-1] + OBSERVATION
            if left < 2 * OBSERVATION:
                break
        found.append(Plan(prompt, turns, [rng.uniform(0.1, 1.0) for _ in turns]))
    return found


class PlannedEngine(VllmEngine):
    """Generates as many tokens as the plan says, whatever the limit is, and counts the time without a request."""

    def __init__(self, url: str, lengths: dict[str, int]) -> None:
        super().__init__(url)
        self._lengths, self._requests = lengths, 0
        self.busy_s = 0.0
        self._since = 0.0

    def sampling(self, request_id: str, sampling: Sampling) -> dict[str, Any]:
        return super().sampling(request_id, sampling) | {"max_tokens": self._lengths[request_id], "ignore_eos": True}

    async def generate(self, request_id: str, ids: list[int], sampling: Sampling) -> Generated:
        if not self._requests:
            self._since = time.monotonic()
        self._requests += 1
        try:
            return await super().generate(request_id, ids, sampling)
        finally:
            self._requests -= 1
            if not self._requests:
                self.busy_s += time.monotonic() - self._since

    async def counts(self) -> dict[str, float]:
        metrics = await self.metrics()
        names = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
        return {name: total(metrics, f"vllm:{name}_total") for name in names}

    async def forget(self) -> None:
        await self._send("POST", "/reset_prefix_cache")


async def roll(scheduler: Scheduler, name: str, plan: Plan, lengths: dict[str, int]) -> None:
    ids = list(plan.prompt)
    for turn, wait_s in zip(plan.turns, plan.waits, strict=True):
        lengths[name] = turn
        left = PROMPT + MAX_RESPONSE - len(ids)
        ids += (await scheduler.generate(name, ids, Sampling(left, seed=()))).ids
        await asyncio.sleep(wait_s)
        ids += [100 + turn] * OBSERVATION
    await scheduler.release(name)


async def measure(servers: list[Vllm], arm: str, load: int, seed: int) -> dict[str, Any]:
    lengths: dict[str, int] = {}
    engines = [PlannedEngine(server.url, lengths) for server in servers]
    scheduler = Scheduler(engines, ARMS[arm])
    for engine in engines:
        await engine.forget()
    before = [await engine.counts() for engine in engines]
    began, cpu_s = time.monotonic(), sum(server.cpu_s() for server in servers)
    await asyncio.gather(*(roll(scheduler, str(number), plan, lengths) for number, plan in enumerate(plans(load, seed))))
    wall_s = time.monotonic() - began
    after = [await engine.counts() for engine in engines]
    deltas = {name: sum(one[name] - old[name] for one, old in zip(after, before, strict=True)) for name in after[0]}
    await scheduler.aclose()
    return {
        "arm": arm,
        "load": load,
        "seed": seed,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(sum(server.cpu_s() for server in servers) - cpu_s, 1),
        "preemptions": deltas["num_preemptions"],
        "idle": round(1 - sum(engine.busy_s for engine in engines) / wall_s / len(engines), 3),
        "generated": deltas["generation_tokens"],
        "prefilled": deltas["prefix_cache_queries"] - deltas["prefix_cache_hits"],
        "rollouts": [tracked.served for tracked in scheduler.engines],
    }


async def run(servers: list[Vllm], out: Any, loads: list[int], seeds: list[int]) -> None:
    await measure(servers, "static", 4, 99)  # the first requests are slow
    for seed in seeds:
        for load in loads:
            for arm in list(ARMS) if seed % 2 == 0 else list(ARMS)[::-1]:
                print(json.dumps(await measure(servers, arm, load, seed)), file=out, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/scheduler.jsonl"))
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    small = ("--dtype", "bfloat16", "--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK))
    with contextlib.ExitStack() as stack:
        logs = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        servers = [stack.enter_context(Vllm(SMOLLM2, folder, *small, nice=0)) for folder in logs]
        for server in servers:
            server.wait()
        asyncio.run(run(servers, stack.enter_context(open(args.out, "w")), args.loads, args.seeds))


if __name__ == "__main__":
    main()
