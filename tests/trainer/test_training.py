"""Training with a live service: rollouts, masks, rewards, an update, a kill, two ranks."""

import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from service_harness import QUICK, Service, environment
from trainer_harness import (
    TINY,
    kill_dash_nine_and_resume,
    rollout,
    rows_without_times,
    samples,
    settings_at,
    start_python,
    wait_for_rows,
    with_settings,
    write_settings,
)

from grpo_roc import checkpoint, config, metrics, sft
from grpo_roc.__main__ import main
from grpo_roc.chat import ToolCall
from grpo_roc.distributed import Ranks, pick_device
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import Position, ToolEnv, tool_env
from grpo_roc.evaluate import evaluate, run_eval
from grpo_roc.grpo import select
from grpo_roc.learner import Learner
from grpo_roc.loss import logprobs, logprobs_and_entropies, pad
from grpo_roc.model import load_model, load_tokenizer
from grpo_roc.rollout import Actor, Codec, Limits
from grpo_roc.runs import run_rl
from grpo_roc.tasks import make_task
from loadtest.support.processes import free_port

ROOT = Path(__file__).parents[2]


def _model(folder: Path) -> Any:
    return load_model(folder, TINY.model, pick_device())


def _codec(folder: Path) -> Codec:
    return Codec(load_tokenizer(folder), TINY.chat)


def _actor(folder: Path, env: ToolEnv) -> Actor:
    model = _model(folder)
    return Actor(LocalEngine(model.config, model.state_dict(), TINY.engines[0]), env, _codec(folder))


# -- rollouts -------------------------------------------------------------------------------------------------------------


async def test_a_taught_model_solves_problems_with_the_tool_and_none_without(taught: Path, live_service: Service) -> None:
    settings = settings_at(live_service, "eval.problems=96")
    found = await run_eval(settings, taught, url=live_service.url)
    assert found.metrics["reward/mean"] == pytest.approx(found.scores["heldout"].mean) and found.scores["heldout"].mean > 0.25
    blind = await run_eval(settings, taught, url=live_service.url, tools=False)
    assert blind.scores["heldout"].mean <= 0.03
    assert {one.reward for one in found.rollouts} == {0.0, 1.0} and found.metrics["infra"] == 0
    assert any("error" in one.outcomes and one.correct for one in found.rollouts), "no rollout recovered from an error"


def test_the_command_reports_every_benchmark_and_chooses_nothing_by_it(
    taught: Path, live_service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for name, problems in (("one", make_task(TINY).benchmarks(30)["heldout"]), ("two", make_task(TINY).validation()[:20])):
        rows = [{"id": n, "problem": problem.text, "answer": problem.answer} for n, problem in enumerate(problems)]
        files[name] = str(tmp_path / f"{name}.jsonl")
        Path(files[name]).write_text("\n".join(map(json.dumps, rows)))
    settings = settings_at(live_service, "task.kind=math_jsonl", f"task.eval_files={json.dumps(files)}", "eval.samples=2")
    given = ["--config", write_settings(settings, tmp_path), "--model", str(taught), "--json", str(tmp_path / "eval.json")]
    assert main(["eval", *given]) == 0
    told, written = capsys.readouterr().out, json.loads((tmp_path / "eval.json").read_text())["benchmarks"]
    assert "mean@2" in told and [told.count(f"| {name} |") for name in ("one", "two", "all")] == [1, 1, 1]
    assert {name: one["problems"] for name, one in written.items()} == {"one": 30, "two": 20, "all": 50}
    assert 0 < written["all"]["error"] < min(written["one"]["error"], written["two"]["error"]) and written["all"]["mean"] > 0.25


async def test_rollouts_keep_tokens_and_mask_observations(taught: Path, live_service: Service) -> None:
    codec, model = _codec(taught), _model(taught)
    async with tool_env(settings_at(live_service), live_service.url) as env:
        actor = _actor(taught, env)
        rollouts = await actor.roll(make_task(TINY).benchmarks(12)["heldout"], 2, Limits(5, 300, 1.0), Position(seed=3))
    assert any(one.outcomes for one in rollouts)
    for one in rollouts:
        observed = codec.text([token for token, own in zip(one.ids, one.mask, strict=True) if not own])
        generated = codec.text([token for token, own in zip(one.ids, one.mask, strict=True) if own])
        assert observed.count("<tool_response>") == len(one.outcomes) - int(one.truncated and bool(one.outcomes))
        assert "<tool_response>" not in generated and "<|im_start|>" not in generated
        ids = torch.tensor([one.prompt + one.ids])
        mask = torch.tensor([[0] * len(one.prompt) + one.mask])
        whole = logprobs(model, ids, mask)[0, len(one.prompt) - 1 :]
        assert torch.allclose(whole, torch.tensor(one.logprobs), atol=1e-3)


async def test_lockstep_is_the_same_twice_and_async_finds_the_same_rollouts(taught: Path, live_service: Service) -> None:
    asked = (make_task(TINY).batch(0, 0, 4), 4, Limits(5, 300, 1.0), Position(seed=5))
    async with tool_env(settings_at(live_service), live_service.url) as env:
        once = await _actor(taught, env).roll(*asked, lockstep=True)
        again = await _actor(taught, env).roll(*asked, lockstep=True)
        free = await _actor(taught, env).roll(*asked, lockstep=False)
    assert [(one.ids, one.logprobs, one.reward) for one in once] == [(one.ids, one.logprobs, one.reward) for one in again]
    same = sum(a.ids == b.ids for a, b in zip(once, free, strict=True))
    assert same >= 14  # other batches, other last bits


async def test_tool_outcomes_are_the_models_fault_unless_the_service_failed(live_service: Service) -> None:
    async with tool_env(settings_at(live_service, "noise.fault_rate=0.0"), live_service.url) as env:
        ok = await env.run(ToolCall("print(6 * 7)"))
        value = await env.run(ToolCall("6 * 7"))
        error = await env.run(ToolCall("1 / 0"))
        slow = await env.run(ToolCall("while True: pass"))
    assert (ok.text, ok.outcome) == ("42", "ok") and value.text == "42"
    assert error.outcome == "error" and "ZeroDivisionError" in error.text
    assert (slow.outcome, slow.status) == ("error", "timeout")


async def test_faults_are_injected_by_place_and_can_be_recovered_from(live_service: Service) -> None:
    async with tool_env(settings_at(live_service, "noise.fault_rate=0.5"), live_service.url) as env:
        places = [Position(1, step) for step in range(24)]
        first = [await env.run(ToolCall("print(1)"), at) for at in places]
        again = [await env.run(ToolCall("print(1)"), at) for at in places]
    assert [one.status for one in first] == [one.status for one in again]
    assert {"injected_fault", "ok"} == {one.status for one in first}


async def test_an_unavailable_service_is_not_the_models_fault(taught: Path) -> None:
    settings = with_settings("service.patience_s=0.3", "service.deadline_s=0.5")
    async with tool_env(settings, "http://127.0.0.1:9") as env:
        found = await evaluate(_actor(taught, env), make_task(TINY).benchmarks(8), TINY.eval, seed=0)
    rollouts = found.rollouts
    assert (
        found.metrics["infra"]
        == found.scores["heldout"].unknown
        == sum("infra" in one.outcomes or one.reward is None for one in rollouts)
        > 0
    )
    assert all(one.reward is None for one in rollouts if "infra" in one.outcomes)
    assert "error" not in {
        outcome
        for one in rollouts
        for outcome, status in zip(one.outcomes, one.statuses, strict=True)
        if status == "unavailable"
    }


# -- selection and learning -----------------------------------------------------------------------------------------------


def test_unknown_rewards_are_left_out_and_equal_groups_are_counted() -> None:
    rl = msgspec.structs.replace(TINY.rl, group=2)
    rollouts = [
        *(rollout(1.0, group=0) for _ in range(4)),
        *(rollout(0.0, group=1) for _ in range(4)),
        rollout(1.0, group=2), rollout(0.0, group=2), rollout(None, ("infra",), group=2), rollout(1.0, group=2),
        rollout(None, ("infra",), group=3), rollout(1.0, group=3),
    ]  # fmt: skip
    selected = select(rollouts, rl, 0)
    assert (selected.all1, selected.all0, selected.mixed) == (2, 1, 1)
    assert all(one.reward is not None for one in selected.kept) and len(selected.kept) == 2


def test_the_grpo_arm_keeps_everything() -> None:
    rl = msgspec.structs.replace(TINY.rl, arm="grpo", group=3)
    selected = select([rollout(1.0), rollout(0.0), rollout(1.0)], rl, 0)
    assert len(selected.samples) == 3


def _learn(folder: Path, changes: dict[str, Any], steps: int = 2) -> tuple[dict[str, Any], Any]:
    model = _model(folder)
    learner = Learner(
        model, msgspec.structs.replace(TINY.rl, lr=1e-3, warmup=0, **changes), Ranks(config.Parallel(), pick_device())
    )
    for step in range(steps):
        row = learner.update(samples(), step)
    return row, model


def test_micro_batches_do_not_change_the_update(untaught: Path) -> None:
    whole, _ = _learn(untaught, {"micro_tokens": 10_000}, steps=1)
    small, _ = _learn(untaught, {"micro_tokens": 16}, steps=1)
    for name in ("train/loss", "train/grad_norm", "train/tokens"):
        assert small[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name


def test_the_clip_acts_from_the_second_update_on(untaught: Path) -> None:
    once, _ = _learn(untaught, {}, steps=1)
    assert once["train/ratio_mean"] == pytest.approx(1) and once["train/clip_frac_high"] == once["train/clip_frac_low"] == 0
    often, _ = _learn(untaught, {"updates_per_rollout": 6, "grad_clip": 100.0}, steps=1)
    assert often["train/clip_frac_high"] + often["train/clip_frac_low"] > 0


def test_the_mismatch_of_engine_and_trainer_is_measured(untaught: Path) -> None:
    """A sample's log-probabilities are the model's own, but for one token: log 3 higher at the engine."""
    model, (one, *_) = _model(untaught), samples()
    with torch.no_grad():
        own, entropies = logprobs_and_entropies(model, pad([one.ids]), pad([one.mask]))
    engine = [0.0, *own[0].tolist()]
    engine[-1] += math.log(3)
    row = Learner(model, msgspec.structs.replace(TINY.rl, is_cap=0.5), Ranks(config.Parallel(), pick_device())).update(
        [one._replace(logprobs=engine)], 0
    )
    count = one.tokens
    assert row["mismatch/max"] == pytest.approx(math.log(3), rel=1e-3)
    assert row["mismatch/mean"] == pytest.approx(math.log(3) / count, rel=1e-3)
    assert row["mismatch/kl"] == pytest.approx((1 / 3 - 1 + math.log(3)) / count, rel=1e-2)
    assert row["mismatch/capped"] == pytest.approx((count - 1) / count)  # all ratios are 1 and above 0.5, but for 1/3
    assert row["train/entropy"] == pytest.approx(float(entropies.sum()) / count, rel=1e-4)
    logits = _model(untaught)(input_ids=torch.tensor([one.ids])).logits[0, :-1].detach().float()
    whole = torch.distributions.Categorical(logits=logits).entropy() * torch.tensor(one.mask[1:])
    assert torch.allclose(entropies[0], whole, atol=1e-4)


def test_an_update_makes_good_rollouts_likelier_and_bad_ones_less_so(untaught: Path) -> None:
    def likelihood(model: Any) -> list[float]:
        every = samples()
        with torch.no_grad():
            found = logprobs(model, pad([one.ids for one in every]), pad([one.mask for one in every])).sum(1)
        return [float(value) for value in found]

    before = likelihood(_model(untaught))
    after = likelihood(_learn(untaught, {}, steps=3)[1])
    for one, was, now in zip(samples(), before, after, strict=True):
        assert (now - was) * one.advantage > 0


# -- runs -----------------------------------------------------------------------------------------------------------------


STEPS = ("rl.steps=6", "rl.checkpoint_every=2", "rl.eval_every=3")


@pytest.fixture(scope="module")
def undisturbed(taught: Path, live_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nothing failed."""
    out = tmp_path_factory.mktemp("undisturbed")
    asyncio.run(run_rl(settings_at(live_service, *STEPS), taught, out, eval_problems=8))
    return out


def test_kill_dash_nine_and_resume_gives_the_same_rows(
    taught: Path, undisturbed: Path, live_service: Service, tmp_path: Path
) -> None:
    kill_dash_nine_and_resume(settings_at(live_service, *STEPS), taught, tmp_path)
    assert rows_without_times(tmp_path) == rows_without_times(undisturbed) and len(rows_without_times(tmp_path)) == 6
    assert "eval/reward" in rows_without_times(tmp_path)[-1] and (undisturbed / "best" / "model.safetensors").exists()
    csv = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(csv) == 7


def test_a_checkpoint_of_other_settings_is_refused(untaught: Path, tmp_path: Path) -> None:
    model = _model(untaught)
    checkpoint.save(tmp_path / "c", model.config, model.state_dict(), None, None, checkpoint.State(3), TINY)
    assert checkpoint.load_state(tmp_path / "c", with_settings("rl.steps=99")).step == 3
    moved = with_settings("engines=[{url: 'http://elsewhere:1'}]")
    assert checkpoint.load_state(tmp_path / "c", moved).step == 3
    with pytest.raises(checkpoint.CheckpointError, match="other settings"):
        checkpoint.load_state(tmp_path / "c", with_settings("rl.lr=0.5"))


def test_a_crash_between_two_renames_leaves_the_old_checkpoint(untaught: Path, tmp_path: Path) -> None:
    model = _model(untaught)
    checkpoint.save(tmp_path / "c", model.config, model.state_dict(), None, None, checkpoint.State(1), TINY)
    (tmp_path / "c").rename(tmp_path / ".c.old")
    found = checkpoint.latest(tmp_path / "c")
    assert found is not None and checkpoint.load_state(found, TINY).step == 1


def test_training_goes_on_when_the_service_was_killed_and_came_back(taught: Path, undisturbed: Path, tmp_path: Path) -> None:
    """No failed call is scored, and the run ends with the same rewards."""
    port = free_port()
    up = [sys.executable, "-m", "exec_service", "up", "--port", str(port)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            up, cwd=ROOT, env=environment(**QUICK), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    settings = with_settings(f"service.url=http://127.0.0.1:{port}", "rl.steps=4", "service.deadline_s=5")
    service = start()
    try:
        given = ("--config", write_settings(settings, tmp_path), "--model", str(taught), "--out", str(tmp_path))
        process = start_python("-m", "grpo_roc", "rl", *given)
        wait_for_rows(process, tmp_path, 2)
        service.send_signal(signal.SIGKILL)
        service.wait()
        time.sleep(1)
        done = len(metrics.read(tmp_path))
        service = start()
        assert process.wait(600) == 0
    finally:
        service.terminate()
        service.wait(120)
    rows = metrics.read(tmp_path)
    assert done < len(rows) == 4
    assert sum(row["infra"] for row in rows) == 0
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in metrics.read(undisturbed)[:4]]


# -- SFT ------------------------------------------------------------------------------------------------------------------


def test_sft_learns_only_the_assistants_own_text(untaught: Path) -> None:
    codec = _codec(untaught)
    (segments,) = make_task(TINY).demonstrations(0, 0, 1)
    ids, mask = sft.encode(codec, segments, 512)
    learned = codec.text([token for token, own in zip(ids, mask, strict=True) if own])
    assert learned == "".join(segment.text for segment in segments if segment.learned)


def test_a_resumed_sft_ends_with_the_same_weights(untaught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = with_settings("sft.steps=6", "sft.batch=4")
    whole = sft.run_sft(settings, untaught, tmp_path / "whole")
    monkeypatch.setattr(sft, "CHECKPOINT_EVERY", 3)
    with monkeypatch.context() as broken:
        broken.setattr(sft, "make_task", lambda settings: _BreaksAt(make_task(settings), step=4))
        with pytest.raises(ConnectionError):
            sft.run_sft(settings, untaught, tmp_path / "resumed")
    resumed = sft.run_sft(settings, untaught, tmp_path / "resumed")
    again = _model(resumed).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in _model(whole).state_dict().items())


class _BreaksAt:
    def __init__(self, task: Any, step: int) -> None:
        self._task, self._step = task, step

    def demonstrations(self, seed: int, step: int, count: int) -> Any:
        if step == self._step:
            raise ConnectionError
        return self._task.demonstrations(seed, step, count)
