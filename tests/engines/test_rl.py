"""GRPO-RoC over HTTP: real engines, real tool calls in a real service."""

import asyncio
from pathlib import Path

import httpx
from engine_harness import Vllm, at
from service_harness import Service

from grpo_roc import metrics
from grpo_roc.engines.base import Load, Sampling
from grpo_roc.engines.vllm import VllmEngine
from grpo_roc.runs import open_run, run_rl


async def test_three_steps_with_tool_calls(toy: Path, pair: list[Vllm], live_service: Service, tmp_path: Path) -> None:
    for server in pair:
        server.wait()
    settings = at(live_service.url, [server.url for server in pair], "rl.steps=3", "rl.prompts=4", "rl.eval_every=3")
    await run_rl(settings, toy, tmp_path, eval_problems=8)
    rows = metrics.read(tmp_path)
    print([{name: round(value, 6) for name, value in row.items() if "mismatch" in name or "reward" in name} for row in rows])
    assert len(rows) == 3 and all(row["calls"] > 0 and row["infra"] == 0 for row in rows) and "eval/reward" in rows[-1]
    trained = [row for row in rows if "train/tokens" in row]
    # The weights are pushed in bf16, and the trainer has more bits.
    assert trained and all(0 < row["mismatch/mean"] < 0.05 and row["train/entropy"] > 0 for row in trained)
    assert [server.label()[:2] for server in pair] == ["3-", "3-"]


async def test_load_and_preemptions_are_those_of_the_engine(pair: list[Vllm]) -> None:
    """Without seeds: vLLM for CPUs dies when it preempts a request that has one ("CPU Generator does not use offset")."""
    pair[1].wait()
    engine = VllmEngine(pair[1].url)
    idle = await engine.load()
    assert (idle.capacity, idle.used, idle.running, idle.waiting) == (8192, 0, 0, 0)
    seen: list[Load] = []
    async with httpx.AsyncClient(base_url=pair[1].url, timeout=600, trust_env=False) as client:
        # 760 tokens are six blocks of 128, of which there are 64: ten requests run, and each soon needs a seventh.
        asked = [{"token_ids": [n + 5] * 760, "sampling_params": {"max_tokens": 200, "ignore_eos": True}} for n in range(24)]
        calls = [asyncio.create_task(client.post("/inference/v1/generate", json=one)) for one in asked]
        while not all(call.done() for call in calls):
            seen.append(await engine.load())
            await asyncio.sleep(0.2)
        assert {(await call).status_code for call in calls} == {200}
    assert max(load.used for load in seen) > 6000 and max(load.running for load in seen) > 8
    assert max(load.waiting for load in seen) > 0 and (await engine.load()).preempted > idle.preempted
    await engine.aclose()


async def test_many_requests_with_seeds_begin_at_once(pair: list[Vllm]) -> None:
    """Their prompts have more tokens together than the engine computes in one step (2,048)."""
    pair[0].wait()
    engine = VllmEngine(pair[0].url)
    asked = [engine.generate(f"many{n}", [n % 50 + 5] * 90, Sampling(4, seed=(n,))) for n in range(40)]
    assert all(one.ids for one in await asyncio.gather(*asked))
    await engine.aclose()


async def test_an_engine_is_killed_and_restarted_during_a_run(
    toy: Path, pair: list[Vllm], live_service: Service, tmp_path: Path
) -> None:
    first, second = pair
    for server in pair:
        server.wait()
    settings = at(live_service.url, [server.url for server in pair], "rl.prompts=2")
    restarted = resynced = False
    async with open_run(settings, toy, tmp_path, 8) as run:
        assert run.engine is not None
        async with asyncio.timeout(1500):
            while not resynced:
                row = await run.step(0)
                assert row["infra"] == 0 and row["calls"] > 0
                if run.state.step == 1:
                    asyncio.get_running_loop().call_later(1.0, first.kill)  # while it generates
                if run.state.step == 3:
                    first.start()
                    restarted = True
                labels = [await _label(server) for server in pair]
                resynced = restarted and labels[0] == labels[1]
        row = await run.step(0)
        assert row["infra"] == 0
        assert run.engine.losses >= 1 and all(tracked.usable for tracked in run.engine.engines)
        assert first.label() == second.label() == run.engine._weights.label


async def _label(server: Vllm) -> str:
    try:
        return await asyncio.to_thread(server.label)
    except httpx.HTTPError:
        return ""
