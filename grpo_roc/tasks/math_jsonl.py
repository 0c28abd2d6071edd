"""Problems from JSONL files.

    RL:          {"id"?: …, "problem": …, "answer": …}      integer answers only; others are dropped and counted
    evaluation:  the same, with any answer; one file per benchmark
    SFT:         {"messages": [{"role": …, "content": …}, …]}

`python -m grpo_roc prepare` makes the first two. Training problems that share eight words in a row with an evaluation problem
are dropped.
"""

import json
import re
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
        if not self._settings.rl_file:
            return []
        read, self.not_integer = read_problems(self._settings.rl_file)
        problems = decontaminate(read, self._heldout)
        self.contaminated = len(read) - len(problems)
        return problems

    @cached_property
    def _heldout(self) -> list[Problem]:
        return [problem for problems in self.benchmarks().values() for problem in problems]

    def benchmarks(self) -> dict[str, list[Problem]]:
        """The evaluation problems by benchmark, so that each can be reported apart."""
        files = self._settings.eval_files or {"heldout": self._settings.eval_file}
        return {name: read_problems(file, integer=False)[0] for name, file in files.items() if file}

    @cached_property
    def _dialogues(self) -> list[dict[str, Any]]:
        return read_lines(self._settings.sft_file) if self._settings.sft_file else []

    @property
    def texts(self) -> list[str]:
        return [problem.text for problem in self.pool]

    def heldout(self, count: int) -> list[Problem]:
        return self._heldout[:count]

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
