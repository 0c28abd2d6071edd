"""Rollouts of the next step during the update: their age, what corrects for it, resume, stages."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from common import wait_until
from service_harness import Service
from trainer_harness import (
    TINY,
    kill_dash_nine_and_resume,
    rollout,
    rows_without_times,
    run_ranks,
    settings_at,
    with_settings,
)

from grpo_roc import config, learner, metrics, overlap, runs, stages
from grpo_roc.engines.local import LocalEngine
from grpo_roc.learner import Learner
from grpo_roc.rollout import Limits
from grpo_roc.runs import run_rl
from grpo_roc.tasks import make_task

OVERLAP = ("rl.overlap=one_step_off", "rl.is_cap=2.0", "rl.lr=1e-3", "rl.warmup=0")
STEPS = (*OVERLAP, "rl.steps=6", "rl.checkpoint_every=2", "rl.eval_every=3")


def test_overlap_without_importance_weights_is_refused() -> None:
    with pytest.raises(config.ConfigError, match=r"set rl\.is_cap"):
        config.load("cpu_tiny", ["rl.overlap=one_step_off"])


def test_overlap_with_engines_that_sleep_during_the_update_is_refused() -> None:
    with pytest.raises(config.ConfigError, match=r"scheduler\.colocated"):
        config.load("cpu_tiny", [*OVERLAP, "scheduler.colocated=true"])


@pytest.fixture(scope="module")
def undisturbed(taught: Path, live_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nothing failed."""
    out = tmp_path_factory.mktemp("overlapped")
    asyncio.run(run_rl(settings_at(live_service, *STEPS), taught, out, eval_problems=8))
    return out


def test_rollouts_are_one_update_old_from_the_second_step_on(undisturbed: Path) -> None:
    rows = metrics.read(undisturbed)
    assert [row["rollout/age"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert rows[0]["mismatch/max"] < 1e-3, "rollouts of the same weights have the same log-probabilities"
    assert max(row["mismatch/max"] for row in rows[1:]) > 0.01
    assert all(0 <= row[f"time/{part}_idle_share"] <= 1 for row in rows for part in ("trainer", "engine"))


def test_kill_dash_nine_and_resume_gives_the_same_rows_with_overlap(
    taught: Path, undisturbed: Path, live_service: Service, tmp_path: Path
) -> None:
    """The checkpoint has the rollouts that were made with the weights before it."""
    kill_dash_nine_and_resume(settings_at(live_service, *STEPS), taught, tmp_path)
    assert rows_without_times(tmp_path) == rows_without_times(undisturbed)


def test_engine_and_trainer_work_at_once_and_evaluations_see_new_weights(
    taught: Path, live_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[LocalEngine] = []
    evaluated: list[int] = []
    weighted: list[float] = []
    update, evaluate, importance = Learner.update, runs.evaluate, learner.truncated_importance

    def watched_update(self: Learner, samples: Any, step: int) -> Any:
        if step < 2:
            before = engines[0].steps
            wait_until(lambda: engines[0].steps > before, "the engine to generate during the update", 120)
        return update(self, samples, step)

    def watched_evaluate(actor: Any, *arguments: Any, **named: Any) -> Any:
        evaluated.append(actor.engine.version)
        return evaluate(actor, *arguments, **named)

    def watched_importance(*arguments: Any) -> torch.Tensor:
        found = importance(*arguments)
        weighted.append(float((found - 1).abs().max()))
        return found

    make = runs.make_engine
    monkeypatch.setattr(runs, "make_engine", lambda *a, **b: engines.append(make(*a, **b)) or engines[0])
    monkeypatch.setattr(Learner, "update", watched_update)
    monkeypatch.setattr(runs, "evaluate", watched_evaluate)
    monkeypatch.setattr(learner, "truncated_importance", watched_importance)
    settings = settings_at(live_service, *OVERLAP, "rl.steps=3", "rl.eval_every=2")
    asyncio.run(run_rl(settings, taught, tmp_path, eval_problems=8))
    assert evaluated == [2]
    assert weighted[0] < 1e-3 and max(weighted) > 0.01


def test_a_stage_begins_with_rollouts_of_its_own_limits(taught: Path, live_service: Service, tmp_path: Path) -> None:
    two = [{"steps": 2, "max_response": 160, "turns": 2}, {"steps": 2, "max_response": 300, "turns": 5}]
    settings = settings_at(live_service, *OVERLAP, f"stages={two}")
    asyncio.run(stages.run_stages(settings, taught, tmp_path, eval_problems=8))
    assert [row["rollout/age"] for row in metrics.read(tmp_path)] == [0, 1, 0, 1]


class _Actor:
    """Rolls until it is let go."""

    def __init__(self) -> None:
        self.go, self.cancelled, self.rolled = asyncio.Event(), False, 0

    async def roll(self, problems: Any, count: int, limits: Limits, at: Any, times: Any) -> Any:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.rolled += 1
        return [rollout(1.0, weight_version=at.step)]


async def test_rollouts_that_were_begun_are_taken_encoded_or_discarded() -> None:
    actor: Any = _Actor()
    rl, task, limits = with_settings(*OVERLAP).rl, make_task(TINY), Limits(1, 9, 1.0)
    made = overlap.Rollouts(actor, rl)
    assert await made.encode() == b""
    made.begin(4, task, limits)
    actor.go.set()
    encoded = await made.encode()
    other = overlap.Rollouts(actor, rl)
    other.restore(encoded)
    assert await other.take(4, task, limits) == await made.take(4, task, limits)
    assert actor.rolled == 1, "restored rollouts are not made again"
    actor.go.clear()
    made.begin(5, task, limits)
    await asyncio.sleep(0)
    await made.discard()
    actor.go.set()
    assert actor.cancelled and (await made.take(6, task, limits)).step == 6


def _train(settings: config.Config, start: Path, out: Path) -> None:
    asyncio.run(run_rl(settings, start, out, eval_problems=4))


def test_two_sharded_ranks_overlap_and_resume(taught: Path, live_service: Service, tmp_path: Path) -> None:
    changes = (*OVERLAP, "rl.packing=true", "rl.eval_every=2", "rl.checkpoint_every=2", "parallel.kind=fsdp2")
    begin, end = (settings_at(live_service, *changes, f"rl.steps={steps}") for steps in (2, 4))
    assert run_ranks(2, _train, begin, taught, tmp_path) == [0, 0]
    assert (tmp_path / "latest" / "optimizer_shards").is_dir() and list((tmp_path / "model").glob("*.safetensors"))
    assert run_ranks(2, _train, end, taught, tmp_path) == [0, 0]
    rows = metrics.read(tmp_path)
    assert [row["rollout/age"] for row in rows] == [0, 1, 0, 1]  # the second step was the last one and began no other
    assert all("eval/reward" in row for row in rows[1::2])
