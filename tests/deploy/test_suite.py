"""How deploy/test.sh runs the suite, seen with a pytest that only writes down what it is asked for."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from chart_harness import ROOT

PYTEST = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1 ;; esac
"""


def run_suite(folder: Path, *arguments: str, fails: str = "nothing", **settings: str) -> tuple[int, list[str]]:
    """The exit code of deploy/test.sh, and the command lines of pytest."""
    log, program = folder / "log", folder / "pytest"
    program.write_text(PYTEST)
    program.chmod(0o755)
    told = {"BIN": str(folder), "LOG": str(log), "FAILS": fails, "TRAINER": "yes"}
    done = subprocess.run(
        ["sh", "deploy/test.sh", *arguments],
        cwd=ROOT,
        env=os.environ | told | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, log.read_text().splitlines()


def test_no_test_is_tried_again(tmp_path: Path) -> None:
    code, lines = run_suite(tmp_path)
    assert code == 0 and not [line for line in lines if "rerun" in line]
    files = [ROOT / name for name in ("Makefile", "pyproject.toml", "deploy/test.sh", ".ci/run")]
    assert [file.name for file in files if re.search("rerun|flaky", file.read_text())] == []


def test_tests_run_at_the_same_time_unless_they_need_the_machine_for_themselves(tmp_path: Path) -> None:
    _, lines = run_suite(tmp_path)
    alone, *rest = lines
    assert "-m alone" in alone and "-n" not in alone.split()
    [others] = [line for line in rest if "-m not alone" in line]
    [trainer] = [line for line in rest if "tests/trainer" in line.replace("--ignore=tests/trainer", "")]
    assert int(others.split("-n ")[1]) >= 2 and others != trainer


@pytest.mark.parametrize(
    "fails", ["-m alone", "-m not alone", "tests/trainer tests/trainer_integrations"], ids=["alone", "others", "trainer"]
)
def test_one_failure_anywhere_is_a_failure(tmp_path: Path, fails: str) -> None:
    assert run_suite(tmp_path, fails=fails)[0] != 0


def test_the_trainers_tests_can_be_left_out(tmp_path: Path) -> None:
    _, lines = run_suite(tmp_path, TRAINER="no")
    assert len(lines) == 2 and "--ignore=tests/trainer " in lines[1]


def test_arguments_are_given_to_pytest_as_they_are(tmp_path: Path) -> None:
    assert run_suite(tmp_path, "-k", "two words") == (0, ["-q -k two words"])
