"""Problems of reasoning-gym: demonstrations, scores, and runs that are interrupted."""

import asyncio
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from service_harness import Service
from trainer_harness import rows_without_times, settings_at, with_settings

from grpo_roc import chat, config, metrics
from grpo_roc.__main__ import main
from grpo_roc.experiments import reasoning as experiment
from grpo_roc.model import make_tiny
from grpo_roc.runs import run_rl
from grpo_roc.tasks import make_task


@pytest.fixture(scope="module")
def reasoning() -> Any:
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    from grpo_roc.tasks import reasoning

    return reasoning


@pytest.fixture(scope="module")
def settings(reasoning: Any) -> config.Config:
    every = {name: {} for name in reasoning.PROGRAMS}
    shown = ["products", "gcd", "letter_counting"]
    return with_settings(
        "task.kind=reasoning_gym",
        f"task.datasets={json.dumps(every)}",
        f"task.demonstrated={json.dumps(shown)}",
        "task.val_problems=20",
        "chat.observation_chars=400",
    )


def run_program(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code)
    return printed.getvalue().strip()


def test_every_data_sets_program_prints_an_answer_that_its_scorer_accepts(reasoning: Any, settings: config.Config) -> None:
    for name, problems in make_task(settings).benchmarks(10).items():
        for problem in problems:
            item = reasoning.dataset(settings.task, name)[int(problem.id.rpartition("-")[2])]
            given = run_program(reasoning.PROGRAMS[name](item["metadata"]))
            assert reasoning.score(settings.task, problem.id, f"<answer>\\boxed{{{given}}}</answer>") == 1, problem
            assert reasoning.score(settings.task, problem.id, f"<answer>{given}7</answer>") == 0, "part of an answer is wrong"


def test_splits_share_no_text_and_steps_repeat(settings: config.Config) -> None:
    task = make_task(settings)
    test = {problem.text for problems in task.benchmarks(20).values() for problem in problems}
    validation = {problem.text for problem in task.validation()}
    train = {problem.text for step in range(30) for problem in task.batch(0, step, 8)}
    assert not (test & validation or test & train or validation & train) and len(train) > 200
    assert task.batch(0, 3, 8) == task.batch(0, 3, 8) != task.batch(0, 4, 8)


def test_demonstrations_call_the_tool_on_the_demonstrated_sets_only(reasoning: Any, settings: config.Config) -> None:
    dialogues = make_task(settings).demonstrations(0, 0, 80)
    learned = ["".join(part.text for part in dialogue if part.learned) for dialogue in dialogues]
    turns = [chat.read_turn(text) for text in learned]
    calls = [call for turn in turns for call in turn.calls]
    assert all(isinstance(call, chat.ToolCall) for call in calls) and all(turn.answers == 1 for turn in turns)
    codes = [call.code for call in calls if isinstance(call, chat.ToolCall)]
    assert {True, False} == {"gcd" in code for code in codes} and not any("lcm" in code or "bin(" in code for code in codes)
    counts = [len(turn.calls) for turn in turns]
    assert {0, 1, 2} == {*counts}, "guesses, calls, and calls that repair a bug"


def test_unknown_data_sets_are_refused(reasoning: Any) -> None:
    with pytest.raises(config.ConfigError, match="known ones"):
        make_task(with_settings("task.kind=reasoning_gym", "task.datasets={quantum_lock: {}}")).benchmarks(1)


def test_rl_on_reasoning_problems_resumes_with_the_same_rows(
    settings: config.Config, live_service: Service, tmp_path: Path
) -> None:
    at = msgspec.structs.replace(settings, service=settings_at(live_service).service, engines=[INT8])
    make_tiny(at, tmp_path / "tiny")

    def train(out: str, steps: int) -> Path:
        changed = config.with_rl(at, steps=steps, checkpoint_every=2, is_cap=2.0, max_response=40)
        asyncio.run(run_rl(changed, tmp_path / "tiny", tmp_path / out))
        return tmp_path / out

    whole = rows_without_times(train("whole", 4))
    train("parts", 2)
    assert rows_without_times(train("parts", 4)) == whole and len(whole) == 4


INT8 = config.Engine(max_len=768, capacity=1 << 14, linear="int8")


def test_the_reasoning_command_reports_before_and_after_and_repeats_nothing(
    settings: config.Config, live_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = with_settings(
        "sft.steps=2", "sft.batch=4", "rl.steps=2", "rl.is_cap=2", "eval.problems=2", "rl.max_response=40",
        "eval.max_response=40", f"service.url={live_service.url}", base=settings,
    )  # fmt: skip
    make_tiny(at, tmp_path / "tiny")
    (tmp_path / "settings.json").write_text(json.dumps(config.as_dict(at)))
    given = ["reasoning", "--config", str(tmp_path / "settings.json"), "--model", str(tmp_path / "tiny")]
    given += ["--out", str(tmp_path / "out")]
    assert main(given) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("±") > 4 * 7 and "products, demonstrated" in text and "| lcm |" in text and "| all |" in text
    assert len(metrics.read(tmp_path / "out" / "rl")) == 2

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished part ran again")

    for part in ("run_sft", "run_rl", "run_eval"):
        monkeypatch.setattr(experiment, part, again)
    assert main(given) == 0
