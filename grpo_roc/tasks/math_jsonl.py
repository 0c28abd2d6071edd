"""Problems from JSONL files.

    RL:          {"id"?: …, "problem": …, "answer": …}      integer answers only; others are dropped and counted
    evaluation:  the same, with any answer; one file per benchmark, and one for validation
    SFT:         {"messages": [{"role": …, "content": …}, …]}

`python -m grpo_roc prepare` makes the first two. Without a file for validation, up to a tenth of the RL problems are held out
for it. Training problems that share eight words in a row with a validation or test problem are dropped.
"""

import json
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_roc import chat
from grpo_roc.tasks.base import Problem, Segment, Task, passes

GRAM = 8


class DataError(ValueError):
    """Invalid data; the message names the file and the line."""


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not an object")
        rows.append(row)
    return rows


def read_integer(answer: object) -> str | None:
    """The answer without thousands separators and leading zeros, or None if it is no integer."""
    text = str(answer).strip().replace(",", "")
    return str(int(text)) if re.fullmatch(r"[+-]?\d+", text) else None


def read_problems(path: str | Path, *, integer: bool = True) -> tuple[list[Problem], int]:
    """The problems, and the number of those left out. With `integer`, only those with an integer answer."""
    problems, dropped = [], 0
    for number, row in enumerate(read_lines(path), 1):
        if not isinstance(row.get("problem"), str) or "answer" not in row:
            raise DataError(f"{path}, problem {number}: the fields problem and answer are required")
        answer = read_integer(row["answer"])
        if answer is None and integer:
            dropped += 1
        else:
            problems.append(Problem(str(row.get("id", number)), row["problem"], answer or str(row["answer"]).strip()))
    return problems, dropped


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[first : first + GRAM]) for first in range(len(words) - GRAM + 1)}


def decontaminate(problems: Iterable[Problem], benchmark: Iterable[Problem]) -> list[Problem]:
    known = {gram for problem in benchmark for gram in grams(problem.text)}
    return [problem for problem in problems if not grams(problem.text) & known]


class MathJsonl(Task):
    not_integer = contaminated = 0

    def _make_pool(self) -> Sequence[Problem]:
        _, self.not_integer = self._read
        validation = set(self._validation)
        rest = [problem for problem in self._uncontaminated if problem not in validation]
        problems = decontaminate(rest, self._validation)
        self.contaminated = len(self._read[0]) - len(self._uncontaminated) + len(rest) - len(problems)
        return problems

    @cached_property
    def _read(self) -> tuple[list[Problem], int]:
        return read_problems(self._settings.rl_file) if self._settings.rl_file else ([], 0)

    @cached_property
    def _uncontaminated(self) -> list[Problem]:
        return decontaminate(self._read[0], (one for problems in self._benchmarks.values() for one in problems))

    @cached_property
    def _validation(self) -> list[Problem]:
        """Chosen by the text alone, so that a longer file keeps most of them."""
        most = self._settings.val_problems
        if self._settings.val_file:
            return read_problems(self._settings.val_file, integer=False)[0][:most]
        known = self._uncontaminated
        return sorted(known, key=lambda one: zlib.crc32(one.text.encode()))[: min(most, len(known) // 10)]

    @cached_property
    def _benchmarks(self) -> dict[str, list[Problem]]:
        files = self._settings.eval_files or {"heldout": self._settings.eval_file}
        return {name: read_problems(file, integer=False)[0] for name, file in files.items() if file}

    def benchmarks(self, count: int = sys.maxsize) -> dict[str, list[Problem]]:
        return {name: problems[:count] for name, problems in self._benchmarks.items()}

    def validation(self) -> list[Problem]:
        return self._validation

    @cached_property
    def _dialogues(self) -> list[dict[str, Any]]:
        return read_lines(self._settings.sft_file) if self._settings.sft_file else []

    @property
    def texts(self) -> list[str]:
        return [problem.text for problem in self.pool]

    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]:
        return [self._demonstration(row) for row in passes(self._dialogues, seed, step, count)]

    def _demonstration(self, row: dict[str, Any]) -> list[Segment]:
        if not isinstance(row.get("messages"), list):
            raise DataError(f"{self._settings.sft_file}: a demonstration needs a list of messages")
        segments = []
        for message in row["messages"]:
            own = message["role"] == "assistant"
            segments.append(Segment(f"{chat.START}{message['role']}\n", False))
            segments.append(Segment(f"{message['content']}{chat.END}", own))
            segments.append(Segment("\n", False))
        return segments
