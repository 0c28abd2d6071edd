"""Writes docs/support.md from the records of test runs in docs/support: `make support`.

A run with EXEC_SUPPORT_RECORD=docs/support adds its record (tests/support_record.py). Nothing that was not run is in the page.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS, PAGE = ROOT / "docs" / "support", ROOT / "docs" / "support.md"
HEAD = """# Support matrix

What the tests ran on, and how they ended. `make support` writes this page from the records in [support](support), which test
runs make: `EXEC_SUPPORT_RECORD=docs/support make test`. What is not in a table was not tried; it may work. Where fewer tests of
a folder are counted than in another row, only some of its files ran. A run that is interrupted leaves no record.

Known: on Python 3.13.0 one run of `client`, not in the table, hung in
`test_fork_while_a_thread_runs_calls_does_not_disturb_either` and was ended by hand. The forked child waited in OpenSSL
(`SSLContext`) for a lock that another thread held at the fork. The next run of the same tests passed.
"""
KINDS = {
    "server": ("Redis and Valkey", "server"),
    "kubernetes": ("Kubernetes: the chart's objects by the schemas of", "version"),
}


def outcome(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts.get(name))


def version_key(text: str) -> tuple[str, list[int]]:
    name, _, numbers = text.rpartition("-")
    return name, [int(part) for part in numbers.split(".")]


def order(record: dict[str, Any]) -> tuple[Any, ...]:
    where = record["machine"]
    return version_key(where["kernel"]), version_key(where["python"]), list(record["tests"])


def page(records: list[dict[str, Any]]) -> str:
    lines = [HEAD, "## Kernels and Pythons", ""]
    lines += [
        "| kernel | control groups | system | Python | as | tests | outcome |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in sorted(records, key=order):
        where, tests = record["machine"], record["tests"]
        total = sum((Counter(counts) for counts in tests.values()), Counter[str]())
        names = ", ".join(f"`{name.removeprefix('tests/')}` {sum(counts.values())}" for name, counts in tests.items())
        cells = [f"Linux {where['kernel']} {where['architecture']}", where["control_groups"], where["system"], where["python"]]
        lines.append(f"| {' | '.join([*cells, where['user'], names, outcome(total)])} |")
    for kind, (title, column) in KINDS.items():
        found: dict[str, Counter[str]] = {}
        for record in records:
            for version, counts in record[kind].items():
                found.setdefault(version, Counter()).update(counts)
        if found:
            lines += ["", f"## {title}", "", f"| {column} | outcome |", "| --- | --- |"]
            lines += [
                f"| {version.replace('-', ' ').capitalize()} | {outcome(found[version])} |"
                for version in sorted(found, key=version_key)
            ]
    return "\n".join(lines) + "\n"


def main() -> int:
    made = page([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))])
    if sys.argv[1:] == ["--check"]:
        return 0 if PAGE.read_text() == made else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
