"""Problems for training and evaluation from files of published data sets.

    python -m grpo_roc prepare dapo dapo-math-17k.parquet --out data/dapo.jsonl

Reads parquet (if pyarrow is installed), JSON (a list of rows) and JSONL, and writes JSONL that `tasks/math_jsonl.py` reads:
{"id", "problem", "answer"}. It downloads nothing. Each benchmark gets a file of its own, and its name begins the ids.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_roc.tasks.math_jsonl import DataError, read_integer, read_lines


@dataclass(frozen=True)
class Kind:
    """A data set: the fields where its copies keep problem and answer; the first that a row has is taken."""

    problem: tuple[str, ...]
    answer: tuple[str, ...]
    integer: bool = True  # leave out other answers
    size: int = 0  # number of problems, if known


# `a.b` is the field b of a; `a.0` is the first element of a.
KINDS = {
    "dapo": Kind(("prompt.0.content", "prompt"), ("reward_model.ground_truth", "solution", "answer")),
    "aime24": Kind(
        ("problem", "Problem", "question", "prompt.0.content"), ("answer", "Answer", "reward_model.ground_truth"), size=30
    ),
    "aime25": Kind(
        ("problem", "Problem", "question", "prompt.0.content"), ("answer", "Answer", "reward_model.ground_truth"), size=30
    ),
    "math500": Kind(("problem", "question"), ("answer",), integer=False, size=500),
    "jsonl": Kind(("problem", "question", "prompt"), ("answer", "ground_truth", "label"), integer=False),
}
# The instructions that DAPO's files put around a problem; the chat format has its own.
_BEFORE = re.compile(r"\ASolve the following math problem step by step\..*?\n\n", re.S)
_AFTER = re.compile(r"\n\nRemember to put your answer on its own line after \"Answer:\"\.\s*\Z")


@dataclass
class Counts:
    written: int = 0
    repeated: int = 0  # the same problem again
    not_integer: int = 0

    def __str__(self) -> str:
        return f"{self.written} problems; left out: {self.repeated} repeated, {self.not_integer} without an integer answer"


def prepare(name: str, files: Iterable[str | Path], out: str | Path) -> Counts:
    """Write the problems of `files` to `out`.

    Raises:
        DataError: a file cannot be read, a row has no problem or answer, or a benchmark is not complete.
    """
    kind, found, counts = KINDS[name], {}, Counts()
    for path in files:
        for number, row in enumerate(_rows(Path(path)), 1):
            problem, answer = _problem(kind, row, f"{path}, row {number}")
            if kind.integer and read_integer(answer) is None:
                counts.not_integer += 1
            elif problem in found:
                counts.repeated += 1
            else:
                whole = read_integer(answer) if kind.integer else None
                found[problem] = answer if whole is None else whole
    if kind.size and len(found) != kind.size:
        raise DataError(f"{name} has {kind.size} problems, these files have {len(found)}")
    counts.written = len(found)
    lines = [
        json.dumps({"id": f"{name}/{number}", "problem": problem, "answer": answer}, ensure_ascii=False)
        for number, (problem, answer) in enumerate(found.items(), 1)
    ]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text("".join(line + "\n" for line in lines))
    return counts


def _problem(kind: Kind, row: dict[str, Any], where: str) -> tuple[str, str]:
    problem, answer = _first(row, kind.problem), _first(row, kind.answer)
    if not isinstance(problem, str) or isinstance(answer, (dict, list, type(None))):
        raise DataError(f"{where}: no problem in {', '.join(kind.problem)} or no answer in {', '.join(kind.answer)}")
    return _AFTER.sub("", _BEFORE.sub("", problem)).strip(), str(answer).strip()


def _first(row: Any, paths: Iterable[str]) -> Any:
    for path in paths:
        value = row
        for part in path.split("."):
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    match path.suffix:
        case ".parquet":
            yield from _parquet(path)
        case ".json":
            try:
                rows = json.loads(path.read_text())
            except ValueError as error:
                raise DataError(f"{path}: not JSON: {error}") from error
            if not isinstance(rows, list):
                raise DataError(f"{path}: not a list of rows")
            yield from rows
        case ".jsonl":
            yield from read_lines(path)
        case _:
            raise DataError(f"{path}: the name ends neither with .parquet nor with .json or .jsonl")


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow; run `pip install pyarrow`, or convert the file to JSONL") from error
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()
