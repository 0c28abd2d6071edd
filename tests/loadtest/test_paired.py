"""The comparison of two source trees: its interval, what counts as a difference, and a small run of a tree against itself."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from common import need_root_and_nsjail

from loadtest.bench import paired
from loadtest.bench.agent import Outcome

ROOT = Path(__file__).parents[2]


def test_interval_of_nine_ratios_is_second_smallest_to_second_largest() -> None:
    low, high, coverage = paired.interval([1.08, 0.97, 1.00, 1.02, 0.99, 1.01, 1.20, 0.90, 1.03])
    assert (low, high) == (0.97, 1.08)
    assert coverage == pytest.approx(1 - 2 * (1 + 9) / 2**9)  # less than two of them below, or above, the median


def test_interval_of_too_few_ratios_is_their_range_and_says_how_little_it_covers() -> None:
    assert paired.interval([1.2, 1.0, 1.1]) == (1.0, 1.2, 0.75)
    assert paired.interval([1.1]) == (1.1, 1.1, 0.0)


def test_interval_narrows_with_more_ratios() -> None:
    ratios = [1 + number / 100 for number in range(25)]
    low, high, coverage = paired.interval(ratios)
    assert (low, high) == (ratios[7], ratios[-8])
    assert 0.95 <= coverage < 0.99


def test_other_status_or_output_is_a_difference_but_not_how_far_a_time_out_got() -> None:
    right = Outcome("ok", "1\n", "", 0.1)
    assert not paired.differing(right, msgspec.structs.replace(right, latency_s=9.0))
    assert "status" in paired.differing(right, msgspec.structs.replace(right, status="error"))
    assert "stdout" in paired.differing(right, msgspec.structs.replace(right, stdout="2\n"))
    assert not paired.differing(Outcome("timeout", "1\n2\n", "", 1.0), Outcome("timeout", "1\n", "", 1.0))


def test_base_that_is_no_commit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    assert paired.main(["--base", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["http", "redis"])
def test_each_tree_runs_its_own_code_and_equal_trees_agree(
    arm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_root_and_nsjail()
    base, file = tmp_path / "base", tmp_path / "pairs.json"
    shutil.copytree(ROOT, base, ignore=paired.NOT_SOURCE)
    with (base / "worker/__init__.py").open("a") as module:  # shows whose code runs
        module.write("import os\nos.environ['EXEC_SLOTS'] = '1'\n")
    arguments = ["--base", str(base), "--repeats", "1", "--calls", "6", "--mix", "std", "--arms", arm]
    arguments += ["--most", "1000", "--json", str(file)]
    assert paired.main(arguments) == 0, capsys.readouterr()
    found = msgspec.json.decode(file.read_bytes(), type=paired.Comparison)
    assert [(pair.base.mix, pair.new.arm, pair.new.calls) for pair in found.pairs] == [("std", arm, 6)]
    assert all(pair.base.cpu_ms > 0 and pair.new.cpu_ms > 0 for pair in found.pairs)
    assert found.slots["base"] == 1 < found.slots["new"]
    assert not found.differences
    assert found.checked == 6
    assert not list((ROOT / "build").glob("paired-*"))
