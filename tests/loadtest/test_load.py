"""locust with every class of users, against a real service: nothing fails, and its statistics have the stages and the blame."""

import csv
import importlib.util
import os
from pathlib import Path

import pytest
from common import unavailable

from loadtest.load import __main__ as load
from loadtest.support.processes import Part

USERS = 10  # the sum of the weights of all classes
# Each of the two processes reports every 3 s; its last report may come too late.
WANTED = {"batch", "stream", "judge", "verify", "session", "stage", "blame", "POST"}
ADAPTERS = {"/run/long-batch", "/run_code", "/execute", "/api/v2/execute", "/mcp"}


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if int(row["Request Count"])]


def need_locust() -> None:
    if importlib.util.find_spec("locust") is None:
        unavailable("locust is not installed")
    if os.geteuid() != 0:
        unavailable("the sandbox needs root")


@pytest.mark.slow
def test_a_burst_ends_when_every_call_of_it_is_answered(tmp_path: Path) -> None:
    need_locust()
    with Part.up(profiles='{"bare": []}') as service:
        options = ["--url", service.url, "--shape", "burst", "--users", "4", "--mix", "std", "--processes", "2"]
        assert load.main([*options, "--", "--calls", "50", "--csv", str(tmp_path / "burst")]) == 0
    rows = rows_of(tmp_path / "burst_stats.csv")
    assert sum(int(row["Request Count"]) for row in rows if row["Type"] == "burst") == 200
    assert "second" in {row["Type"] for row in rows}
    assert sum(int(row["Failure Count"]) for row in rows) == 0


@pytest.mark.slow
def test_every_class_of_users_is_served_and_counted(tmp_path: Path) -> None:
    need_locust()
    with Part.up(profiles='{"bare": [], "sympy": ["sympy"]}') as service:
        options = ["--url", service.url, "--users", str(USERS), "--time", "7s", "--mix", "std", "--processes", "2"]
        assert load.main([*options, "--", "--calls", "4", "--csv", str(tmp_path / "load")]) == 0
    rows = rows_of(tmp_path / "load_stats.csv")
    assert {row["Type"] for row in rows} >= WANTED
    assert {row["Name"].partition(" ")[0] for row in rows if row["Type"] == "POST"} == ADAPTERS
    assert {row["Name"] for row in rows if row["Type"] == "stage"} == {"queue", "start", "run"}
    assert "none" in {row["Name"] for row in rows if row["Type"] == "blame"}
    assert sum(int(row["Failure Count"]) for row in rows) == 0
