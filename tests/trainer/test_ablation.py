"""The ablation: its arms, intervals and statements, and a small run that is interrupted."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from service_harness import Service
from trainer_harness import TINY, rollout, settings_at

from grpo_roc import config, metrics
from grpo_roc.experiments import ablation
from grpo_roc.experiments.ablation import ARMS, NOISE, SHOWN, Point, Runs
from grpo_roc.experiments.statistics import interval, t_quantile
from grpo_roc.grpo import select


@pytest.mark.parametrize(
    ("share", "degrees", "wanted"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.995, 4, 4.604), (0.975, 30, 2.042), (0.95, 9, 1.833)],
)
def test_quantiles_are_those_of_the_tables(share: float, degrees: int, wanted: float) -> None:
    assert t_quantile(share, degrees) == pytest.approx(wanted, abs=1e-3)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = [abs((one := interval([rng.gauss(3, 2) for _ in range(5)], 0.9)).mean - 3) <= one.half for _ in range(2000)]
    assert sum(covered) / 2000 == pytest.approx(0.9, abs=0.02)
    assert math.isinf(interval([1.0], 0.95).half) and not interval([1.0], 0.95).excludes_zero


def test_all_arms_make_as_many_rollouts_and_differ_in_what_they_keep() -> None:
    every = {arm: ablation.arm_settings(TINY, arm, "high", 3) for arm in ARMS}
    assert {one.rl.group * (1 if one.rl.arm == "grpo" else one.rl.oversample) for one in every.values()} == {8}
    assert {one.rl.seed for one in every.values()} == {3} and {one.noise.fault_rate for one in every.values()} == {0.15}
    group = [rollout(1.0, ("error", "ok") if n % 2 else ("ok",), sample=n) for n in range(4)]
    group += [rollout(0.0, sample=n) for n in range(4, 8)]
    kept = {arm: select(group, one.rl, 0).kept for arm, one in every.items()}
    assert {arm: len(found) for arm, found in kept.items()} == {"roc": 4, "topk": 4, "uniform": 4, "keep_all": 8, "penalty": 8}


def test_the_penalty_makes_a_clean_rollout_better_than_one_with_errors() -> None:
    rl = ablation.arm_settings(TINY, "penalty", "none", 0).rl
    clean, repaired, wrong = select([rollout(1.0), rollout(1.0, ("error", "ok")), rollout(0.0)], rl, 0).samples
    assert clean.advantage > repaired.advantage > 0 > wrong.advantage
    same = select([rollout(1.0), rollout(1.0, ("error",))], rl, 0)
    assert same.mixed == 1 and len(same.samples) == 2, "the penalty tells correct rollouts apart"
    none = msgspec.structs.replace(rl, error_penalty=0.0)
    assert select([rollout(1.0), rollout(1.0, ("error",))], none, 0).all1 == 1


def made_up(gap: float, seeds: Sequence[int] = range(5)) -> Runs:
    """RoC has `gap` fewer tool errors; arms that keep all learn from twice as many tokens."""

    def run(arm: str, seed: int) -> list[Point]:
        rng = random.Random(f"{arm}:{seed}")
        twice = 2 if ARMS[arm]["arm"] == "grpo" else 1
        rows = []
        for step in (10, 20):
            errors = 0.3 - 0.01 * step * twice - (gap if arm == "roc" else 0) + rng.gauss(0, 0.005)
            row = dict.fromkeys(SHOWN, 1.0) | {"eval/err_in_pos": errors, "eval/reward": 0.9 + rng.gauss(0, 0.01)}
            rows.append(Point(step, 1000.0 * step * twice, row))
        return rows

    return {noise: {arm: {seed: run(arm, seed) for seed in seeds} for arm in ARMS} for noise in NOISE}


def test_equal_tokens_compares_where_all_have_learned_from_as_many() -> None:
    runs = made_up(0.0)
    at_end = ablation.value(runs, "none", "keep_all", 0, "eval/err_in_pos", "rollouts")
    earlier = ablation.value(runs, "none", "keep_all", 0, "eval/err_in_pos", "tokens")
    assert earlier == runs["none"]["keep_all"][0][0].row["eval/err_in_pos"] > at_end
    line = runs["none"]["keep_all"][0]
    assert ablation.at_tokens(line, 30_000, "eval/err_in_pos") == pytest.approx((earlier + at_end) / 2)


def test_a_difference_is_stated_only_if_the_corrected_interval_excludes_zero() -> None:
    errors = {line.split(",")[0]: line for line in ablation.statements(made_up(0.1), range(5)) if "equal tokens" in line}
    assert errors["- tool errors in correct rollouts"].count("against") == 12
    nothing = [line for line in ablation.statements(made_up(0.0), range(5)) if line.startswith("- reward")]
    assert len(nothing) == 2 and all("no difference" in line for line in nothing)
    assert ablation.corrected_level() == pytest.approx(1 - 0.05 / 12)


async def test_a_small_ablation_writes_its_page_and_repeats_nothing(
    taught: Path, live_service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "NOISE", {"none": (0.0, 0.0)})
    settings = settings_at(live_service, "rl.steps=2", "rl.eval_every=1", "task.val_problems=6", "rl.max_response=160")
    page, asked = tmp_path / "results" / "ablation.md", []

    async def watched(settings: config.Config, start: Path, out: Path) -> Path:
        asked.append(out.name)
        return await run_rl(settings, start, out)

    run_rl = ablation.run_rl
    monkeypatch.setattr(ablation, "run_rl", watched)
    text = await ablation.run(settings, tmp_path / "runs", taught, [0], page)
    assert page.read_text() == text and page.with_suffix(".png").stat().st_size > 10_000
    assert "## At equal tokens" in text and text.count("| none |") == 2 * (5 + 4)
    assert asked == [f"none-{arm}-0" for arm in ARMS]
    rows = metrics.read(tmp_path / "runs" / "none-keep_all-0")
    assert all(f"eval/{name}" in rows[0] for name in ("err_in_pos", "len/mean", "answers>1"))
    await ablation.run(settings, tmp_path / "runs", taught, [0], page)
    assert len(asked) == 5
