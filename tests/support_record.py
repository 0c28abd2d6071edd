"""Records where the tests ran and how they ended, if EXEC_SUPPORT_RECORD names a folder; deploy/support.py shows it."""

import json
import os
import platform
import re
from collections import Counter
from pathlib import Path

import pytest

# What a test ran with, by the parameter in its name.
WITH = {"server": r"\b(redis|valkey)-(\d[\d.]*)", "kubernetes": r"test_chart\.py::.*\b()(1\.\d\d)\b"}


class SupportRecord:
    """A plugin of the process that collects all reports."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:  # a failed or skipped set-up, a failed tear-down
            worse = "failed" if self._outcomes.get(report.nodeid) == "failed" else report.outcome
            self._outcomes[report.nodeid] = worse

    def pytest_sessionfinish(self) -> None:
        counted = {folder: Counter[str]() for folder in sorted({_folder(name) for name in self._outcomes})}
        used: dict[str, dict[str, Counter[str]]] = {kind: {} for kind in WITH}
        for name, outcome in self._outcomes.items():
            counted[_folder(name)][outcome] += 1
            for kind, pattern in WITH.items():
                if found := re.search(pattern, name):
                    version = "-".join(part for part in found.groups() if part)
                    used[kind].setdefault(version, Counter())[outcome] += 1
        record = {"machine": machine(), "tests": counted, **used}
        self._folder.mkdir(parents=True, exist_ok=True)
        parts = [record["machine"]["kernel"], "python", record["machine"]["python"], *(Path(name).name for name in counted)]
        (self._folder / f"{'-'.join(parts)}.json").write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict[str, str]:
    system = platform.freedesktop_os_release()
    groups = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
    return {
        "kernel": re.match(r"[\d.]+", platform.release())[0].rstrip("."),  # type: ignore[index]
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "system": f"{system.get('NAME', '')} {system.get('VERSION_ID', '')}".strip(),
        "control_groups": groups,
        "user": "root" if os.geteuid() == 0 else "plain user",
    }


def _folder(name: str) -> str:
    return "/".join(name.split("/")[:2])
