"""The loop with a live service: rollouts, masks, rewards, an update, a kill, two ranks."""

from __future__ import annotations

import asyncio
import json
import os
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
from trainer_harness import TINY, rollout, with_settings

from grpo_roc import build, checkpoint, config, metrics, runs, sft
from grpo_roc.chat import ToolCall
from grpo_roc.device import pick
from grpo_roc.distributed import Team
from grpo_roc.engines.local import LocalEngine
from grpo_roc.env import Place, tool_env
from grpo_roc.evaluate import evaluate
from grpo_roc.grpo import Learner, Sample, choose
from grpo_roc.rollout import Limits, run_async, run_lockstep
from loadtest.support.processes import free_port

ROOT = Path(__file__).parents[2]


def _at(service: Service, *changes: str) -> config.Config:
    return with_settings(f"service.url={service.url}", *changes)


def _engine(folder: Path, **settings: Any) -> LocalEngine:
    model = build.model(folder, TINY.model, pick())
    return LocalEngine(model.config, model.state_dict(), msgspec.structs.replace(TINY.engines[0], **settings))


# -- rollouts -------------------------------------------------------------------------------------------------------------


async def test_a_taught_model_solves_problems_with_the_tool_and_none_without(taught: Path, live_service: Service) -> None:
    settings = _at(live_service, "eval.problems=96")
    found, rollouts = await runs.run_eval(settings, taught, url=live_service.url)
    assert found["reward/mean"] > 0.25
    blind, _ = await runs.run_eval(settings, taught, url=live_service.url, tools=False)
    assert blind["reward/mean"] <= 0.03
    assert {one.reward for one in rollouts} == {0.0, 1.0} and found["infra"] == 0
    assert any("error" in one.outcomes and one.correct for one in rollouts), "nobody recovered from an error"


async def test_rollouts_are_token_in_token_out_and_what_was_heard_is_masked(taught: Path, live_service: Service) -> None:
    tokenizer = build.tokenizer(taught)
    codec, model = build.codec(TINY, tokenizer), build.model(taught, TINY.model, pick())
    async with tool_env(_at(live_service), live_service.url) as env:
        rollouts = await run_lockstep(
            build.task(TINY).heldout(12),
            2,
            engine=_engine(taught),
            env=env,
            codec=codec,
            limits=Limits(5, 300, 1.0),
            at=Place(seed=3),
        )
    assert any(one.outcomes for one in rollouts)
    for one in rollouts:
        heard = codec.text([token for token, own in zip(one.ids, one.mask, strict=True) if not own])
        said = codec.text([token for token, own in zip(one.ids, one.mask, strict=True) if own])
        assert heard.count("<tool_response>") == len(one.outcomes) - int(one.truncated and bool(one.outcomes))
        assert "<tool_response>" not in said and "<|im_start|>" not in said
        ids = torch.tensor([one.prompt + one.ids])
        mask = torch.tensor([[0] * len(one.prompt) + one.mask])
        from grpo_roc.policy import logprobs

        whole = logprobs(model, ids, mask)[0, len(one.prompt) - 1 :]
        assert torch.allclose(whole, torch.tensor(one.logprobs), atol=1e-3)


async def test_lockstep_is_the_same_twice_and_async_finds_the_same_rollouts(taught: Path, live_service: Service) -> None:
    codec = build.codec(TINY, build.tokenizer(taught))
    problems = build.task(TINY).batch(0, 0, 4)
    common: Any = {"codec": codec, "limits": Limits(5, 300, 1.0), "at": Place(seed=5)}
    async with tool_env(_at(live_service), live_service.url) as env:
        once = await run_lockstep(problems, 4, engine=_engine(taught), env=env, **common)
        again = await run_lockstep(problems, 4, engine=_engine(taught), env=env, **common)
        free = await run_async(problems, 4, engine=_engine(taught), env=env, **common)
    assert [(one.ids, one.logprobs, one.reward) for one in once] == [(one.ids, one.logprobs, one.reward) for one in again]
    same = sum(a.ids == b.ids for a, b in zip(once, free, strict=True))
    assert same >= 14  # other batches, other last bits


async def test_tool_outcomes_are_the_models_fault_unless_the_service_failed(live_service: Service) -> None:
    async with tool_env(_at(live_service, "noise.fault_rate=0.0"), live_service.url) as env:
        ok = await env.run(ToolCall("print(6 * 7)"))
        value = await env.run(ToolCall("6 * 7"))
        error = await env.run(ToolCall("1 / 0"))
        slow = await env.run(ToolCall("while True: pass"))
    assert (ok.text, ok.outcome) == ("42", "ok") and value.text == "42"
    assert error.outcome == "error" and "ZeroDivisionError" in error.text
    assert (slow.outcome, slow.status) == ("error", "timeout")


async def test_faults_are_injected_by_place_and_can_be_recovered_from(live_service: Service) -> None:
    async with tool_env(_at(live_service, "noise.fault_rate=0.5"), live_service.url) as env:
        places = [Place(1, step) for step in range(24)]
        heard = [await env.run(ToolCall("print(1)"), at) for at in places]
        again = [await env.run(ToolCall("print(1)"), at) for at in places]
    assert [one.status for one in heard] == [one.status for one in again]
    assert {"injected_fault", "ok"} == {one.status for one in heard}


async def test_a_service_that_stays_away_is_nobodys_fault(taught: Path) -> None:
    settings = with_settings("service.patience_s=0.3", "service.deadline_s=0.5")
    async with tool_env(settings, "http://127.0.0.1:9") as env:
        found, rollouts = await evaluate(
            build.task(TINY).heldout(8),
            TINY.eval,
            engine=_engine(taught),
            env=env,
            codec=build.codec(TINY, build.tokenizer(taught)),
            seed=0,
        )
    assert found["infra"] == sum("infra" in one.outcomes or one.reward is None for one in rollouts) > 0
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
    selected = choose(rollouts, rl, 0)
    assert (selected.all1, selected.all0, selected.mixed) == (2, 1, 1)
    assert all(one.reward is not None for one in selected.kept) and len(selected.kept) == 2


def test_the_grpo_arm_keeps_everything() -> None:
    rl = msgspec.structs.replace(TINY.rl, arm="grpo", group=3)
    selected = choose([rollout(1.0), rollout(0.0), rollout(1.0)], rl, 0)
    assert len(selected.samples) == 3


def _samples(count: int = 6) -> list[Sample]:
    made = []
    for number in range(count):
        length = 6 + 3 * number
        mask = [0] * 3 + [1] * (length - 3)
        ids = [(7 * number + place) % 60 + 1 for place in range(length)]
        made.append(Sample(ids, mask, [-1.0] * length, 1.0 if number % 2 else -1.0, number // 2))
    return made


def _learn(folder: Path, changes: dict[str, Any], steps: int = 2) -> tuple[dict[str, Any], Any]:
    model = build.model(folder, TINY.model, pick())
    learner = Learner(model, msgspec.structs.replace(TINY.rl, lr=1e-3, warmup=0, **changes), Team(config.Parallel(), pick()))
    for step in range(steps):
        row = learner.update(_samples(), step)
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


def test_an_update_makes_good_rollouts_likelier_and_bad_ones_less_so(untaught: Path) -> None:
    from grpo_roc.policy import logprobs, pad

    def likelihood(model: Any) -> list[float]:
        samples = _samples()
        with torch.no_grad():
            found = logprobs(model, pad([one.ids for one in samples]), pad([one.mask for one in samples])).sum(1)
        return [float(value) for value in found]

    before = likelihood(build.model(untaught, TINY.model, pick()))
    after = likelihood(_learn(untaught, {}, steps=3)[1])
    for one, was, now in zip(_samples(), before, after, strict=True):
        assert (now - was) * one.advantage > 0


# -- runs -----------------------------------------------------------------------------------------------------------------


def _command(settings: config.Config, model: Path, out: Path) -> tuple[list[str], Path]:
    out.mkdir(parents=True, exist_ok=True)
    file = out / "settings.json"
    file.write_text(json.dumps(config.as_dict(settings)))
    return [sys.executable, "-m", "grpo_roc", "rl", "--config", str(file), "--model", str(model), "--out", str(out)], file


def _rows(out: Path) -> list[dict[str, Any]]:
    return [metrics.without_clocks(row) for row in metrics.read(out)]


def _wait_for_rows(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    give_up = time.monotonic() + 600
    while len(metrics.read(out)) < count:
        assert process.poll() is None and time.monotonic() < give_up, "the run ended, or stands still"
        time.sleep(0.02)


def test_kill_dash_nine_and_resume_gives_the_same_rows(taught: Path, live_service: Service, tmp_path: Path) -> None:
    settings = _at(live_service, "rl.steps=6", "rl.checkpoint_every=2", "rl.eval_every=3")
    asyncio.run(runs.run_rl(settings, taught, tmp_path / "whole", eval_problems=8))
    command, _ = _command(settings, taught, tmp_path / "killed")
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=subprocess.DEVNULL)
    _wait_for_rows(process, tmp_path / "killed", 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(_rows(tmp_path / "killed")) < 6
    asyncio.run(runs.run_rl(settings, taught, tmp_path / "killed", eval_problems=8))
    whole, killed = _rows(tmp_path / "whole"), _rows(tmp_path / "killed")
    for row in (*whole, *killed):
        row.pop("eval/reward", None)  # of 256 problems in the command, of 8 here
    assert killed == whole and len(whole) == 6
    assert (tmp_path / "whole" / "best" / "model.safetensors").exists()
    csv = (tmp_path / "killed" / "metrics.csv").read_text().splitlines()
    assert len(csv) == 7


def test_a_checkpoint_of_other_settings_is_refused(untaught: Path, tmp_path: Path) -> None:
    model = build.model(untaught, TINY.model, pick())
    checkpoint.save(
        tmp_path / "c", model_config=model.config, weights=model.state_dict(), tokenizer=None, optimizer=None,
        state=checkpoint.State(3), settings=TINY,
    )  # fmt: skip
    assert checkpoint.load_state(tmp_path / "c", with_settings("rl.steps=99")).step == 3
    with pytest.raises(checkpoint.CheckpointError, match="other settings"):
        checkpoint.load_state(tmp_path / "c", with_settings("rl.lr=0.5"))


def test_a_crash_between_two_renames_leaves_the_old_checkpoint(untaught: Path, tmp_path: Path) -> None:
    model = build.model(untaught, TINY.model, pick())
    fields: Any = {
        "model_config": model.config,
        "weights": model.state_dict(),
        "tokenizer": None,
        "optimizer": None,
        "settings": TINY,
    }
    checkpoint.save(tmp_path / "c", state=checkpoint.State(1), **fields)
    (tmp_path / "c").rename(tmp_path / ".c.old")
    found = checkpoint.latest(tmp_path / "c")
    assert found is not None and checkpoint.load_state(found, TINY).step == 1


def test_training_goes_on_when_the_service_was_killed_and_came_back(taught: Path, tmp_path: Path) -> None:
    """Nothing that failed because of it is scored, and the run ends as if nothing had happened."""
    port = free_port()
    up = [sys.executable, "-m", "exec_service", "up", "--port", str(port)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            up, cwd=ROOT, env=environment(**QUICK), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    settings = with_settings(f"service.url=http://127.0.0.1:{port}", "rl.steps=5", "service.deadline_s=5")
    service = start()
    try:
        command, _ = _command(settings, taught, tmp_path)
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        _wait_for_rows(process, tmp_path, 2)
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
    assert done < len(rows) == 5
    assert sum(row["infra"] for row in rows) == 0
    quiet = with_settings("rl.steps=5")
    asyncio.run(runs.run_rl(quiet, taught, tmp_path / "quiet"))
    assert [row["reward/mean"] for row in rows] == [row["reward/mean"] for row in metrics.read(tmp_path / "quiet")]


# -- several ranks --------------------------------------------------------------------------------------------------------

RANK = """
import json, sys, torch
sys.path[:0] = [{tests!r}]
torch.set_num_threads(1)
from test_training import _samples
from trainer_harness import TINY
import msgspec
from grpo_roc import build, config
from grpo_roc.device import pick
from grpo_roc.distributed import Team
from grpo_roc.grpo import Learner
kind, model, out = sys.argv[1:]
team = Team(config.Parallel(kind=kind), pick())
its = team.wrap(build.model(model, TINY.model, pick()))
learner = Learner(its, msgspec.structs.replace(TINY.rl, lr=1e-3, warmup=0, micro_tokens=40), team)
rows = [learner.update(team.everyone(_samples(5) if team.leads else None), step) for step in range(3)]
weights = team.weights(its)
if team.leads:
    torch.save(weights, out + "/weights.pt")
    open(out + "/row.json", "w").write(json.dumps(rows[-1]))
team.close()
"""


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_learn_what_one_does(untaught: Path, tmp_path: Path, kind: str) -> None:
    script = tmp_path / "rank.py"
    tests = [str(Path(__file__).parent), str(ROOT), str(ROOT / "tests/service"), str(ROOT / "tests/worker")]
    script.write_text(RANK.replace("[{tests!r}]", repr(tests)))
    found = {}
    for world in (1, 2):
        out = tmp_path / str(world)
        out.mkdir()
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        kinds = "none" if world == 1 else kind
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), kinds, str(untaught), str(out)], cwd=ROOT, env=shared | {"RANK": str(n)}
            )
            for n in range(world)
        ]
        assert [rank.wait(600) for rank in ranks] == [0] * world
        found[world] = torch.load(out / "weights.pt"), json.loads((out / "row.json").read_text())
    for name, value in found[1][0].items():
        assert torch.allclose(value, found[2][0][name], atol=2e-5), name
    for name, number in found[1][1].items():
        assert found[2][1][name] == pytest.approx(number, rel=1e-3, abs=1e-5), name


# -- SFT ------------------------------------------------------------------------------------------------------------------


def test_sft_learns_only_what_the_model_says(untaught: Path) -> None:
    codec = build.codec(TINY, build.tokenizer(untaught))
    (segments,) = build.task(TINY).demonstrations(0, 0, 1)
    ids, mask = sft.encode(codec, segments, 512)
    said = codec.text([token for token, own in zip(ids, mask, strict=True) if own])
    assert said == "".join(segment.text for segment in segments if segment.learned)


def test_a_resumed_sft_ends_with_the_same_weights(untaught: Path, tmp_path: Path) -> None:
    settings = with_settings("sft.steps=6", "sft.batch=4")
    codec, task = build.codec(settings, build.tokenizer(untaught)), build.task(settings)

    def train(model: Any, first: int, steps: int, optimizer: Any = None) -> Any:
        return sft.train(
            model, codec, task, msgspec.structs.replace(settings.sft, steps=steps), seed=0, max_len=512,
            first_step=first, optimizer=optimizer,
        )  # fmt: skip

    whole = build.model(untaught, settings.model, pick())
    train(whole, 0, 6)
    assert sft.learning_rate(0, 6, settings.sft) > 0
    assert len(task.demonstrations(0, 3, 4)) == 4
    assert task.demonstrations(0, 3, 4) == task.demonstrations(0, 3, 4) != task.demonstrations(0, 4, 4)
