"""Settings, tasks, triggers, metrics, entropy: the parts around the loop."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trainer_harness import TINY, rollout, with_settings

from grpo_roc import checkpoint, config, evaluate, metrics, stages
from grpo_roc.__main__ import main
from grpo_roc.engines import expand
from grpo_roc.env import Position
from grpo_roc.experiments import entropy
from grpo_roc.rollout import Limits, Trajectory
from grpo_roc.tasks import make_task, math_jsonl
from grpo_roc.tasks.arith import Arith
from grpo_roc.tasks.base import Problem, passes

# -- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu_tiny", "rocm_8gpu"])
def test_both_configs_are_of_one_schema(name: str) -> None:
    assert len(config.load(name).stages) == 3


def test_unknown_keys_and_wrong_types_are_refused_with_their_path() -> None:
    with pytest.raises(config.ConfigError, match="unknown field `lrr`"):
        config.load("cpu_tiny", ["rl.lrr=1"])
    with pytest.raises(config.ConfigError, match=r"\$\.rl\.group"):
        config.load("cpu_tiny", ["rl.group=many"])
    with pytest.raises(config.ConfigError, match=r"--set takes a\.b=value"):
        config.load("cpu_tiny", ["rl.lr"])
    with pytest.raises(config.ConfigError, match="rocm_8gpu"):
        config.load("no-such-config")


def test_a_change_of_one_setting_wins() -> None:
    assert config.load("cpu_tiny", ["rl.lr=1e-5"]).rl.lr == 1e-5
    assert expand("http://h:3000{0..2}/x") == ["http://h:30000/x", "http://h:30001/x", "http://h:30002/x"]


def test_the_command_says_what_is_wrong_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "--out", "x", "--set", "rl.nope=1"]) == 2
    assert "nope" in capsys.readouterr().err
    assert main(["rl", "--out", "x"]) == 2
    assert "--model" in capsys.readouterr().err


# -- tasks ----------------------------------------------------------------------------------------------------------------


def test_arith_problems_follow_from_seed_and_step_and_heldout_ones_are_others() -> None:
    task = Arith(with_settings("task.problems=[mod,sum,long]").task, TINY.chat)
    assert task.batch(1, 2, 8) == task.batch(1, 2, 8) != task.batch(1, 3, 8)
    heldout = task.benchmarks(2000)["heldout"]
    splits = [heldout, task.validation(), [problem for step in range(50) for problem in task.batch(0, step, 8)]]
    tested, validated, trained = ({problem.id for problem in split} for split in splits)
    assert not tested & validated and not (tested | validated) & trained and len(validated) > 250
    assert all(int(problem.answer) == eval(problem.id) for problem in heldout[:20])
    assert task.demonstrations(0, 3, 4) == task.demonstrations(0, 3, 4) != task.demonstrations(0, 4, 4)


def test_a_pool_is_gone_through_before_it_repeats() -> None:
    pool = [Problem(str(number), "", "") for number in range(10)]
    twice = [one.id for step in range(5) for one in passes(pool, 0, step, 4)]
    assert sorted(twice[:10]) == sorted(twice[10:]) == sorted(one.id for one in pool)
    assert twice[:10] != twice[10:]


def test_math_jsonl_keeps_integers_and_drops_what_is_in_the_benchmark(tmp_path: Path) -> None:
    shared = "Let x be a positive integer such that x squared is nine and"
    rows = [
        {"id": "a", "problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "A half?", "answer": "1/2"},
        {"problem": f"{shared} so on. Find x.", "answer": 3},
        {"problem": "A thousand?", "answer": "1,000"},
    ]
    (tmp_path / "rl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"problem": f"{shared} find it", "answer": "3"}))
    (tmp_path / "sft.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]})
    )
    settings = with_settings(
        "task.kind=math_jsonl", f"task.rl_file={tmp_path}/rl.jsonl", f"task.eval_file={tmp_path}/eval.jsonl",
        f"task.sft_file={tmp_path}/sft.jsonl",
    )  # fmt: skip
    task = make_task(settings)
    assert isinstance(task, math_jsonl.MathJsonl)
    assert [(one.id, one.answer) for one in task.pool] == [("a", "2"), ("4", "1000")]
    assert (task.not_integer, task.contaminated) == (1, 1)
    (segments,) = task.demonstrations(0, 0, 1)
    assert [one.text for one in segments if one.learned] == ["ho<|im_end|>"]


def test_validation_problems_are_neither_trained_on_nor_tested(tmp_path: Path) -> None:
    def write(name: str, *texts: str) -> str:
        (tmp_path / name).write_text("\n".join(json.dumps({"problem": text, "answer": 1}) for text in texts))
        return str(tmp_path / name)

    files = f"task.eval_files={{test: {write('test.jsonl', 'number 7')}}}"
    names = [f"number {n}" for n in range(50)]
    held = ("task.kind=math_jsonl", f"task.rl_file={write('rl.jsonl', *names)}", files, "task.val_problems=3")
    task, again = make_task(with_settings(*held)), make_task(with_settings(*held))
    assert len(task.validation()) == 3 and task.validation() == again.validation()
    assert len(task.pool) == 47 and not set(task.pool) & set(task.validation())
    assert task.with_problems(task.pool[:2]).validation() == task.validation(), "other problems after a filter"
    assert len(make_task(with_settings(*held, "task.val_problems=99")).validation()) == 5, "more than a tenth was held out"
    same = "a problem of eight words or a few more than that"
    of_file = with_settings(
        *held, f"task.rl_file={write('rl.jsonl', same, *names)}", f"task.val_file={write('v', same + ' so')}"
    )
    assert [one.text for one in make_task(of_file).validation()] == [same + " so"]
    assert same not in [one.text for one in make_task(of_file).pool]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"problem": "p", "answer": 1}\nnot json\n')
    with pytest.raises(math_jsonl.DataError, match="line 2"):
        math_jsonl.read_problems(tmp_path / "x.jsonl")


class _FakeActor:
    """Solves `a` in all rollouts and `b` in seven of eight; the service fails for `c`; and stops after some problems."""

    engine = None

    def __init__(self, most: int) -> None:
        self.most, self.tried = most, list[str]()

    async def roll(self, problems: Sequence[Problem], samples: int, limits: Any, at: Position) -> list[Trajectory]:
        (problem,) = problems
        if len(self.tried) == self.most:
            raise ConnectionError
        self.tried.append(problem.id)
        last = {"a": 1.0, "b": 0.0, "c": None}[problem.id]
        first = None if problem.id == "c" else 1.0
        return [rollout(last if n == 7 else first, group=at.group, sample=n) for n in range(samples)]


async def test_problems_solved_every_time_are_dropped_and_a_resumed_filter_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Task:
        def __init__(self, pool: list[Problem]) -> None:
            self.pool, self.with_problems = pool, _Task

    monkeypatch.setattr(evaluate, "IN_PROGRESS", 8)  # one problem at a time
    run: Any = SimpleNamespace(task=_Task([Problem(name, "", "") for name in "abc"]), state=checkpoint.State(5))
    run.out, run.settings, run.actor = tmp_path, TINY, _FakeActor(2)
    with pytest.raises(ConnectionError):
        await stages._keep_hard(run, Limits(1, 1, 1.0))
    path = tmp_path / "filter.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "id": "c", "wro')  # killed while it wrote
    again = run.actor = _FakeActor(9)
    await stages._keep_hard(run, Limits(1, 1, 1.0))
    assert again.tried == ["c"] and [problem.id for problem in run.task.pool] == ["b"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["id"]: row["wrong"] for row in rows} == {"a": 0, "b": 1, "c": 0}


async def test_no_rollout_of_an_evaluation_waits_for_a_slow_one() -> None:
    slow = asyncio.Event()

    class _Uneven(_FakeActor):
        async def roll(self, problems: Sequence[Problem], samples: int, limits: Any, at: Position) -> list[Trajectory]:
            if problems[0].id == "0":
                await slow.wait()
            return [rollout(group=at.group)]

    many = [Problem(str(number), "", "") for number in range(5000)]
    seen = []
    async with asyncio.timeout(60):
        async for part in evaluate.sample(_Uneven(0), many, 1, Limits(1, 1, 1.0), Position()):  # type: ignore[arg-type]
            seen += [one.group for one in part]
            if len(seen) == 4999:
                slow.set()
    assert seen[-1] == 0 and sorted(seen) == list(range(5000))


# -- stages ---------------------------------------------------------------------------------------------------------------


def _row(reward: float = 0.9, clip: float = 0.1, all1: int = 0, **more: Any) -> dict[str, Any]:
    return {"reward/mean": reward, "clip_ratio": clip, "groups/mixed": 8 - all1, "groups/all0": 0, "groups/all1": all1} | more


def test_a_stage_ends_by_its_trigger_or_at_its_cap() -> None:
    stage = config.Stage(steps=20, max_response=1, turns=1, end="plateau")
    rising = [_row(reward=0.02 * number) for number in range(12)]
    assert stages.stage_end(stage, rising) is None
    flat = stages.stage_end(stage, [_row()] * 12)
    assert flat is not None and flat.by == "plateau" and "reward slope" in flat.why
    assert stages.stage_end(stage, [_row(clip=0.5)] * 12) is None
    cap = stages.stage_end(stage, [_row(clip=0.5)] * 20)
    assert cap is not None and cap.by == "cap"


def test_solved_and_eval_drop_triggers() -> None:
    solved = config.Stage(steps=99, max_response=1, turns=1, end="solved")
    assert stages.stage_end(solved, [_row(all1=5)] * 12) is None
    assert (found := stages.stage_end(solved, [_row(all1=7)] * 12)) and found.by == "solved"
    assert "| stage |" in stages.table([])


DROP = config.Stage(steps=99, max_response=1, turns=1, end="eval_drop", min_steps=1)


def _validated(*means: list[float | None]) -> list[dict[str, Any]]:
    return [_row(**{"eval/problems": one}) for one in means]


def test_a_drop_ends_a_stage_only_if_it_is_more_than_noise() -> None:
    before: list[float | None] = [1.0] * 60 + [0.0] * 40
    noise = before[:55] + [0.0] * 5 + [1.0] * 3 + [0.0] * 37  # 5 problems lost and 3 won: 0.02 ± 0.028
    lost = before[:40] + [0.0] * 60  # 20 problems lost: 0.20 ± 0.040
    assert stages.stage_end(DROP, _validated(noise), before) is None
    found = stages.stage_end(DROP, _validated(noise, lost), before)
    assert found and found.by == "eval_drop" and "from 0.600 to 0.400: 0.200 ± 0.040" in found.why
    assert stages.stage_end(DROP, [*_validated(lost), _row()], before) is None, "a step without a validation ended the stage"
    unknown: list[float | None] = [None] * 99 + [0.0]
    assert stages.stage_end(DROP, _validated(unknown), before) is None, "one known problem ended the stage"


def _ends_by_noise(rng: Any, problems: int, samples: int, validations: int) -> bool:
    """A policy that does not change: each problem has its own chance, and every validation draws its rollouts."""
    chances = rng.beta(0.5, 0.5, problems)
    drawn = [(rng.binomial(samples, chances) / samples).tolist() for _ in range(validations + 1)]
    return any(stages.stage_end(DROP, _validated(*drawn[1 : last + 1]), drawn[0]) for last in range(1, validations + 1))


@pytest.mark.parametrize(("problems", "samples"), [(256, 4), (256, 1), (60, 16), (60, 1)])
def test_noise_alone_ends_fewer_than_two_percent_of_the_stages(problems: int, samples: int) -> None:
    """125 steps with a validation every 20, as in rocm_8gpu."""
    rng = np.random.default_rng([problems, samples])
    ended = sum(_ends_by_noise(rng, problems, samples, 6) for _ in range(1000))
    print(f"{problems} problems, {samples} samples: {ended} of 1000 stages end by noise")
    assert ended < 20


def test_a_real_drop_of_a_tenth_ends_a_stage() -> None:
    rng, ended = np.random.default_rng(7), 0
    for _ in range(200):
        chances = rng.beta(0.5, 0.5, 256)
        before, after = ((rng.binomial(4, chances * scale) / 4).tolist() for scale in (1.0, 0.8))  # from 0.5 to 0.4
        ended += stages.stage_end(DROP, _validated(after), before) is not None
    assert ended > 190


# -- scores ---------------------------------------------------------------------------------------------------------------


def test_a_score_has_the_standard_error_over_problems() -> None:
    """Three problems with the means 1, 1/2 and 0; a rollout of the second has no reward, and the fourth problem has none."""
    rewards = [1.0, 1.0, 1.0, None, 0.0, 1.0, 0.0, 0.0, 0.0, None, None, None]
    rollouts = [rollout(reward, group=n // 3, sample=n % 3) for n, reward in enumerate(rewards)]
    found = evaluate.score(rollouts)
    assert evaluate.problem_means(rollouts) == [1.0, 0.5, 0.0, None]
    assert (found.mean, found.problems, found.samples, found.unknown) == (0.5, 3, 3, 4)
    assert found.error == pytest.approx(0.5 / 3**0.5) and str(found) == "0.500 ± 0.289"
    assert str(evaluate.score(rollouts[:3])) == "1.000"


async def test_every_benchmark_is_scored_for_itself_and_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "IN_PROGRESS", 8)

    def named(*ids: str) -> list[Problem]:
        return [Problem(name, "", "") for name in ids]

    actor: Any = _FakeActor(9)
    settings = config.Eval(samples=8)
    found = await evaluate.evaluate(actor, {"one": named("a", "b"), "two": named("b", "b", "c")}, settings, seed=0)
    assert {name: (score.mean, score.problems, score.unknown) for name, score in found.scores.items()} == {
        "one": (15 / 16, 2, 0),
        "two": (7 / 8, 2, 8),
        "all": ((1 + 3 * 7 / 8) / 4, 4, 8),
    }
    assert "| two | 2 | 0.875 | 0.000 | 8 |" in found.table() and "mean@8" in found.table()
    assert json.loads(json.dumps(found.as_dict()))["benchmarks"]["one"]["samples"] == 8
    with pytest.raises(config.ConfigError, match="no problems"):
        await evaluate.evaluate(actor, {"none": []}, settings, seed=0)


# -- metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_count_errors_of_correct_rollouts_without_infra(tmp_path: Path) -> None:
    found = metrics.of_rollouts(
        [
            rollout(1.0, ("error", "ok")),
            rollout(1.0, ("ok", "infra")),
            rollout(0.0, ("error",), answers=2),
            rollout(None, ("infra",)),
        ]
    )
    assert found["err_in_pos"] == pytest.approx(1 / 3) and found["err_all"] == pytest.approx(2 / 4)
    assert found["reward/mean"] == pytest.approx(2 / 3) and found["infra"] == 1 and found["answers>1"] == pytest.approx(1 / 3)
    log = metrics.Metrics(tmp_path, board=False)
    log.add({"step": 0, "a": 1.0})
    log.add({"step": 1, "a": 2.0, "b": 3.0})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,a,b", "0,1.0,", "1,2.0,3.0"]
    again = metrics.Metrics(tmp_path, first_step=1, board=False)
    assert [row["step"] for row in again.rows] == [0]


def test_plots_are_made_of_a_run(tmp_path: Path) -> None:
    from grpo_roc.experiments import plots

    log = metrics.Metrics(tmp_path, board=False)
    for step in range(3):
        log.add({"step": step, "reward/mean": 0.5, "err_in_pos": 0.1, "len/mean": 30.0, "answers>1_in_pos": 0.0})
    png = plots.of_run(tmp_path)
    assert png.stat().st_size > 10_000
    arms = plots.of_arms({"roc": [log.rows], "grpo": [log.rows]}, tmp_path / "ab.png")
    assert arms.stat().st_size > 10_000
    with pytest.raises(FileNotFoundError):
        plots.of_run(tmp_path / "none")


# -- entropy --------------------------------------------------------------------------------------------------------------


def test_high_entropy_tokens_are_sorted_into_kinds(tmp_path: Path) -> None:
    """Made up: of 20 generated tokens, the 4 with the highest entropy are one fork, two reflections and one in code."""
    before = ["But", " maybe", "<tool_call>", "x", "=", "1", "</tool_call>"]
    after = ["Hmm", " wrong", " so", " again", " a", " b", " c", " d", " e", "<answer>", "4", "2", "</answer>"]
    tokens = ["Q", *before, "<tool_response>", "err", *after]
    roles = ["prompt", *["assistant"] * 7, "tool", "tool", *["assistant"] * 13]
    entropies = [9.0, 2.0, 0.1, 0.1, 1.5, 0.1, 0.1, 0.1, 9.0, 9.0, 3.0, 2.5, *[0.1] * 11]
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"tokens": tokens, "entropies": entropies, "roles": roles}) + "\n")
    (one,) = entropy.read(path)
    found = entropy.table([one])
    assert {kind: row["of_top"] for kind, row in found.items()} == {
        "forking": 0.25,
        "reflection": 0.5,
        "code": 0.25,
        "answer": 0.0,
    }
    assert found["code"]["of_all"] == pytest.approx(4 / 20) and found["answer"]["of_all"] == pytest.approx(3 / 20)
    entropy.report(path, tmp_path / "out", 64)
    page = (tmp_path / "out" / "entropy.html").read_text()
    assert page.count(f'background:{entropy.COLOURS["reflection"]}" title') == 2
    assert "| reflection | 0.400 | 0.500 | 1.25 |" in (tmp_path / "out" / "entropy.md").read_text()


def test_trajectories_of_unequal_lists_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"tokens": ["a"], "entropies": [], "roles": ["assistant"]}))
    with pytest.raises(ValueError, match="same length"):
        entropy.read(tmp_path / "t.jsonl")


def test_entropies_are_computed_by_the_model_whatever_the_engine_was(untaught: Path, tmp_path: Path) -> None:
    entropy.write(tmp_path / "t.jsonl", [rollout()], TINY, untaught)
    (one,) = entropy.read(tmp_path / "t.jsonl")
    assert one.roles == ["prompt", "prompt", "assistant", "tool", "assistant"]
    assert [value > 0 for value in one.entropies] == [False, False, True, False, True]


def test_entropies_that_no_model_computed_are_refused(tmp_path: Path) -> None:
    made_up = {"tokens": ["a", "b", "c"], "entropies": [9.0, 0.0, 0.0], "roles": ["prompt", "assistant", "assistant"]}
    (tmp_path / "t.jsonl").write_text(json.dumps(made_up))
    with pytest.raises(ValueError, match="all entropies are 0"):
        entropy.report(tmp_path / "t.jsonl", None, 64)
