"""The table "To change X, open Y" names every usual change, and files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGES = [
    *("a language", "a status", "a metric", "a command", "a compat adapter", "the job queue", "a profile"),
    *("a fairness rule", "a lease time", "a seccomp rule", "a helm value", "the client's retry policy"),
]


def test_each_usual_change_has_a_row_with_at_most_three_paths_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.split("## To change X, open Y")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!to change|---)(.+?) \| (.+?) \|$", table, re.M)
    assert [change for change, _ in rows] == CHANGES
    for change, places in rows:
        paths = re.findall(r"`([^`]+)`", places)
        assert 1 <= len(paths) <= 3, change
        assert [path for path in paths if not (ROOT / path).exists()] == [], change


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:exec_\w+|worker|loadtest|grpo_roc|inside|native|tests)/[\w/.-]+\.(?:py|c|h|proto))`", page))
    inside = ROOT / "worker/sandbox/inside"
    roots = [ROOT, ROOT / "worker/sandbox", inside]
    assert named and [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []
