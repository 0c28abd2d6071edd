"""Selection: the paper's equations 4 and 5, counts for every mix, determinism."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc.roc import (
    Rollout,
    advantages,
    all_equal,
    counts,
    format_penalty,
    group_advantages,
    keep_indices,
    penalty,
    select,
    tool_error_share,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("outcomes", "share"),
    [
        ([], 0.5),
        (["ok"], 0.0),
        (["error", "ok"], 0.5),  # a time-out, then fine: the released code finds 0
        (["error", "error", "ok"], 2 / 3),
        (["infra"], 0.5),  # nothing that counts
        (["infra", "ok"], 0.0),
        (["infra", "error", "ok"], 0.5),
    ],
)
def test_tool_error_share_counts_the_models_errors_and_no_infra(outcomes: list[str], share: float) -> None:
    assert tool_error_share(outcomes) == pytest.approx(share)


@pytest.mark.parametrize(
    ("answers", "turns", "found"),
    [(0, 3, 1.0), (1, 1, 0.0), (1, 4, 0.0), (2, 2, 0.5), (2, 1, 1.0), (5, 2, 1.0), (2, 4, 0.25), (1, 0, 0.0)],
)
def test_format_penalty_is_answers_beyond_the_first_per_turn(answers: int, turns: int, found: float) -> None:
    assert format_penalty(answers, turns) == pytest.approx(found)


def test_a_single_turn_without_a_tool_has_half_a_penalty_and_not_more() -> None:
    assert penalty(Rollout(1, [], 1, 1)) == 0.5


@pytest.mark.parametrize("positive", range(33))
def test_counts_add_up_and_keep_two_of_each_kind_where_there_are_two(positive: int) -> None:
    negative = 32 - positive
    kept = counts(negative, positive, 16)
    assert kept.negative + kept.positive == 16
    assert 0 <= kept.negative <= negative and 0 <= kept.positive <= positive
    assert kept.negative >= min(2, negative) and kept.positive >= min(2, positive)
    if negative >= 4 and positive >= 4:
        assert kept.negative == negative // 2


def test_the_only_negative_is_kept_so_that_the_group_still_teaches() -> None:
    assert counts(1, 31, 16) == (1, 15)


def test_fewer_rollouts_than_wanted_are_all_kept() -> None:
    assert counts(3, 2, 8) == (3, 2)


CLEAN, DIRTY, WRONG = Rollout(1, ["ok"], 1, 2), Rollout(1, ["error", "error", "ok"], 2, 4), Rollout(0, ["ok"], 1, 2)


def _kept(mode: str, seeds: int = 300) -> Counter[str]:
    group = [CLEAN] * 6 + [DIRTY] * 6 + [WRONG] * 4
    found: Counter[str] = Counter()
    for seed in range(seeds):
        for index in select(group, 8, random.Random(seed), mode=mode):  # type: ignore[arg-type]
            found["clean" if index < 6 else "dirty" if index < 12 else "wrong"] += 1
    return found


def test_inverse_prefers_clean_rollouts_without_excluding_the_others() -> None:
    found = _kept("inverse")
    assert found["wrong"] == 300 * 2
    assert found["clean"] > 4 * found["dirty"] > 0


def test_topk_takes_only_the_cleanest_and_uniform_does_not_look() -> None:
    assert _kept("topk")["dirty"] == 0
    uniform = _kept("uniform")
    assert 0.8 < uniform["clean"] / uniform["dirty"] < 1.25


def test_inverse_samples_in_proportion_to_one_over_penalty() -> None:
    """One of two: odds are (0.5 + eps) to (0.2 + eps)."""
    group = [Rollout(1, ["error", "ok"], 1, 2), Rollout(1, ["error"] + ["ok"] * 4, 1, 6), WRONG, WRONG]
    first = sum(0 in select(group, 3, random.Random(seed), eps=0.05, min_neg=2, min_pos=1) for seed in range(4000))
    assert first / 4000 == pytest.approx(0.25 / (0.25 + 0.55), abs=0.03)


def test_the_same_seed_selects_the_same_rollouts() -> None:
    group = [CLEAN, DIRTY, WRONG] * 6
    assert [select(group, 8, random.Random(3)) for _ in range(3)] == [select(group, 8, random.Random(3))] * 3
    assert len({tuple(select(group, 8, random.Random(seed))) for seed in range(20)}) > 1


def test_advantages_are_normalised_with_the_unbiased_deviation() -> None:
    found = advantages([1, 0, 0, 1, 1, 1])
    assert sum(found) == pytest.approx(0, abs=1e-9)
    assert found[0] == pytest.approx((1 - 2 / 3) / 0.5163978, rel=1e-4)
    assert advantages([1, 0], std=False) == [0.5, -0.5]


def test_equal_rewards_are_seen() -> None:
    assert all_equal([1, 1]) and all_equal([]) and not all_equal([1, 0])


def test_counts_select_the_same_rollouts_as_outcomes() -> None:
    group = [CLEAN, DIRTY, WRONG, Rollout(1, ["infra", "ok"], 1, 2), Rollout(1, [], 0, 1)] * 4
    told = [[outcome for outcome in one.outcomes if outcome != "infra"] for one in group]
    columns = [one.reward for one in group], [one.count("error") for one in told], [len(one) for one in told]
    for seed in range(20):
        kept = keep_indices(*columns, [one.answers for one in group], [one.turns for one in group], keep=8, seed=seed)
        assert kept == select(group, 8, random.Random(str(seed)))


def test_group_advantages_are_zero_for_all_but_the_selected() -> None:
    rewards = [1.0, 0.0] * 6 + [None]
    found = group_advantages(rewards, [0.0] * 13, 6, "seed")
    kept = [index for index, gain in enumerate(found) if gain]
    assert len(kept) == 6 and 12 not in kept and sum(found) == pytest.approx(0)
    assert [found[index] for index in kept] == pytest.approx(advantages([rewards[index] or 0.0 for index in kept]))
    assert group_advantages([1.0, None, 1.0], [0.0] * 3, 1, "seed") == [0.0] * 3


def test_the_selection_needs_only_the_standard_library() -> None:
    code = "import sys; import grpo_roc.roc; print(*{n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names))"
    told = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert set(told.split()) - {"__main__", "__mp_main__"} == {"grpo_roc"}
