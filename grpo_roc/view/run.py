"""A run's folder as the viewer sees it: curves, and an index of its rollouts by file and offset.

The index has a summary of each rollout; tokens are read from the file when a rollout is looked at. Files are read only as far
as they have grown since the last look.
"""

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_roc import rollout_log
from grpo_roc.panels import LOGARITHMIC, PANELS
from grpo_roc.rollout_log import Group, Rollout, Step, Summary
from grpo_roc.view.lines import GrowingFile, Line

PAGE = 50  # rollouts
POINTS = 400  # of a curve
LIVE_S = 120.0  # a run that wrote something within this time is called running


class Entry(NamedTuple):
    step: int
    group: Group
    summary: Summary
    offset: int  # of its line

    def row(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.summary) | {"step": self.step, "problem": self.group.problem, "truth": self.group.truth}


class Filter(msgspec.Struct, forbid_unknown_fields=True):
    step: int | None = None
    reward: str = ""  # correct, wrong, unknown
    verdict: str = ""  # see rollout_log.Verdict
    calls: str = ""  # error, clean, none, infra
    problem: str = ""
    page: int = 0

    def admits(self, entry: Entry) -> bool:
        one = entry.summary
        return (
            (not self.reward or self.reward == _reward(one))
            and (not self.verdict or self.verdict == one.verdict)
            and (not self.calls or self.calls in _calls(one))
            and (not self.problem or self._names(entry.group))
        )

    def _names(self, group: Group) -> bool:
        wanted = self.problem.casefold()
        return wanted in group.problem.casefold() or wanted in group.prompt.casefold()


def _reward(one: Summary) -> str:
    return "unknown" if one.reward is None else "correct" if one.reward > 0 else "wrong"


def _calls(one: Summary) -> set[str]:
    if not one.outcomes:
        return {"none"}
    return {"clean"} if {*one.outcomes} == {"ok"} else {*one.outcomes}


class RecordedStep:
    """The index of one step's file."""

    def __init__(self, path: Path, number: int) -> None:
        self.number = number
        self._file = GrowingFile(path)
        self.step: Step | None = None
        self.groups: dict[int, Group] = {}
        self.entries: list[Entry] = []
        self.trouble = ""

    def refresh(self) -> None:
        anew, lines = self._file.read()
        if anew:
            self.step, self.groups, self.entries, self.trouble = None, {}, [], ""
        for line in lines:
            if self.trouble:
                continue
            try:
                self._add(line)
            except (msgspec.MsgspecError, KeyError) as error:
                self.trouble = f"step {self.number} cannot be read from byte {line.offset} on: {error}"

    def _add(self, line: Line) -> None:
        if self.step is None:
            version = msgspec.json.decode(line.text, type=_Version).format
            if version != rollout_log.FORMAT:
                self.trouble = f"step {self.number} has format {version}; this version reads {rollout_log.FORMAT}"
                return
        match _DECODER.decode(line.text):
            case Step() as step:
                self.step = step
            case Group() as group:
                self.groups[group.group] = group
            case Summary() as one:
                self.entries.append(Entry(self.number, self.groups[one.group], one, line.offset))

    def rollout(self, entry: Entry) -> Rollout:
        return msgspec.json.decode(self._file.line_at(entry.offset), type=Rollout)


class _Version(msgspec.Struct):
    format: int


_DECODER = msgspec.json.Decoder(Step | Group | Summary)


class Run:
    """Thread-safe: the server answers requests in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._metrics = GrowingFile(folder / "metrics.jsonl")
        self._rows: list[dict[str, Any]] = []
        self._latest: dict[str, Any] = {}  # the last value of every metric
        self._steps: dict[int, RecordedStep] = {}

    def overview(self) -> dict[str, Any]:
        """What the page asks for every few seconds. `version` changes when curves or rollouts have."""
        with self._lock:
            self._refresh()
            steps = [self._steps[number] for number in sorted(self._steps)]
            written = self._written()
            settings = self._settings()
            return {
                "name": settings.get("name", "run"),
                "folder": str(self.folder),
                "planned": settings.get("rl", {}).get("steps"),
                "arm": settings.get("rl", {}).get("arm"),
                "rows": len(self._rows),
                "latest": self._latest,
                "version": f"{len(self._rows)}:{sum(len(one.entries) for one in steps)}",
                "running": written is not None and time.time() - written < LIVE_S,
                "written": written,
                "steps": [[one.number, len(one.entries)] for one in steps],
                "troubles": [one.trouble for one in steps if one.trouble],
            }

    def curves(self) -> list[dict[str, Any]]:
        with self._lock:
            self._refresh()
            rows = list(self._rows)
        return [
            {
                "title": title,
                "log": title in LOGARITHMIC,
                "lines": [{"label": label, "points": _thin(_points(rows, name))} for name, label in lines.items()],
            }
            for title, lines in PANELS.items()
        ]

    def rollouts(self, wanted: Filter) -> dict[str, Any]:
        """One page of those that the filter admits, the newest step first."""
        with self._lock:
            self._refresh()
            every = [entry for number in sorted(self._steps, reverse=True) for entry in self._steps[number].entries]
        found = [entry for entry in every if wanted.step in (None, entry.step) and wanted.admits(entry)]
        first = max(0, wanted.page) * PAGE
        rows = [entry.row() for entry in found[first : first + PAGE]]
        return {"rows": rows, "found": len(found), "all": len(every), "page": wanted.page, "per_page": PAGE}

    def rollout(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """A rollout with its tokens, and summaries of all rollouts of its group. Raises LookupError."""
        with self._lock:
            self._refresh()
            recorded = self._steps[step]
            siblings = [entry for entry in recorded.entries if entry.summary.group == group]
            one = next((entry for entry in siblings if entry.summary.sample == sample), None)
            if one is None:
                raise LookupError
            return {
                "step": recorded.step,
                "group": one.group,
                "siblings": [entry.row() for entry in siblings],
                "rollout": recorded.rollout(one),
            }

    def _refresh(self) -> None:
        anew, lines = self._metrics.read()
        if anew:
            self._rows, self._latest = [], {}
        for line in lines:
            self._rows.append(json.loads(line.text))
            self._latest |= self._rows[-1]
        recorded = rollout_log.steps(self.folder)
        for gone in self._steps.keys() - {*recorded}:
            del self._steps[gone]
        for number in recorded:
            if number not in self._steps:
                self._steps[number] = RecordedStep(rollout_log.path(self.folder, number), number)
            self._steps[number].refresh()

    def _written(self) -> float | None:
        """When the run last wrote something."""
        times = [
            row.stat().st_mtime for row in (self.folder / "metrics.jsonl", self.folder / rollout_log.FOLDER) if row.exists()
        ]
        return max(times, default=None)

    def _settings(self) -> dict[str, Any]:
        path = self.folder / rollout_log.FOLDER / rollout_log.SETTINGS
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return found


def _points(rows: list[dict[str, Any]], name: str) -> Iterator[tuple[int, float]]:
    for row in rows:
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            yield row["step"], value


def _thin(points: Iterator[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS`, each the mean of its neighbours, with the step of the last of them."""
    every = list(points)
    width = math.ceil(len(every) / POINTS)
    parts = (every[first : first + width] for first in range(0, len(every), max(1, width)))
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
