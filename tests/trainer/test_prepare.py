"""Problem files from the formats of published data sets; each file is made here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_roc import config
from grpo_roc.__main__ import main
from grpo_roc.prepare import prepare
from grpo_roc.tasks import make_task
from grpo_roc.tasks.math_jsonl import DataError, MathJsonl, read_lines

ASK = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def dapo(problem: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ASK.format(problem), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


DAPO = [
    dapo("What is $1+1$?", "2"),
    dapo("A half of 1?", "1/2"),
    dapo("What is $1+1$?", "2"),
    dapo("Minus two\n\ntimes two?", "-4"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(rows))
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_dapo_loses_instructions_repetitions_and_fractions(tmp_path: Path, suffix: str) -> None:
    counts = prepare("dapo", [write(tmp_path / f"in.{suffix}", DAPO)], tmp_path / "data" / "dapo.jsonl")
    assert read_lines(tmp_path / "data" / "dapo.jsonl") == [
        {"id": "dapo/1", "problem": "What is $1+1$?", "answer": "2"},
        {"id": "dapo/2", "problem": "Minus two\n\ntimes two?", "answer": "-4"},
    ]
    assert (counts.written, counts.repeated, counts.not_integer) == (2, 1, 1)


def test_processed_dapo_has_a_plain_prompt_and_a_solution(tmp_path: Path) -> None:
    prepare("dapo", [write(tmp_path / "in.jsonl", [{"prompt": "p", "solution": "34"}])], tmp_path / "out.jsonl")
    assert read_lines(tmp_path / "out.jsonl") == [{"id": "dapo/1", "problem": "p", "answer": "34"}]


@pytest.mark.parametrize(
    ("problem", "answer", "given", "found"),
    [("problem", "answer", "025", "25"), ("Problem", "Answer", 204, "204"), ("question", "answer", "70", "70")],
)
def test_aime_is_read_from_every_copys_fields(tmp_path: Path, problem: str, answer: str, given: Any, found: str) -> None:
    rows = [{problem: f"p{number}", answer: given, "year": "2024", "solution": "s"} for number in range(30)]
    counts = prepare("aime24", [write(tmp_path / "in.jsonl", rows)], tmp_path / "out.jsonl")
    read = read_lines(tmp_path / "out.jsonl")
    assert counts.written == 30 and {row["answer"] for row in read} == {found} and read[29]["id"] == "aime24/30"


def test_an_incomplete_benchmark_is_refused(tmp_path: Path) -> None:
    half = write(tmp_path / "i.jsonl", [{"question": f"p{number}", "answer": number} for number in range(15)])
    other = write(tmp_path / "ii.jsonl", [{"question": f"q{number}", "answer": number} for number in range(15)])
    with pytest.raises(DataError, match="aime25 has 30 problems, these files have 15"):
        prepare("aime25", [half], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert prepare("aime25", [half, other], tmp_path / "out.jsonl").written == 30  # AIME I and II in two files


def test_math500_keeps_answers_that_are_no_integers(tmp_path: Path) -> None:
    rows = [
        {
            "problem": f"p{n}",
            "solution": "",
            "answer": "\\frac{1}{2}" if n else "1,000",
            "subject": "Algebra",
            "unique_id": f"t{n}",
        }
        for n in range(500)
    ]
    prepare("math500", [write(tmp_path / "test.jsonl", rows)], tmp_path / "out.jsonl")
    assert [row["answer"] for row in read_lines(tmp_path / "out.jsonl")[:2]] == ["1,000", "\\frac{1}{2}"]


def test_benchmarks_stay_apart_in_the_task(tmp_path: Path) -> None:
    for name in ("aime24", "aime25"):
        rows = [{"problem": f"{name} p{number}", "answer": number} for number in range(30)]
        prepare(name, [write(tmp_path / "in.jsonl", rows)], tmp_path / f"{name}.jsonl")
    half = [{"problem": "h", "answer": "\\frac{1}{2}"}]
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("aime24", "aime25")} | {
        "h": str(write(tmp_path / "h.jsonl", half))
    }
    task = make_task(config.load(None, ["task.kind=math_jsonl", f"task.eval_files={json.dumps(files)}"]))
    assert isinstance(task, MathJsonl)
    assert {name: len(problems) for name, problems in task.benchmarks().items()} == {"aime24": 30, "aime25": 30, "h": 1}
    assert [one.id for one in task.benchmarks(2)["aime25"]] == ["aime25/1", "aime25/2"]
    assert task.benchmarks()["h"][0].answer == "\\frac{1}{2}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.jsonl", '{"question": "p"}', "row 1: no problem in"),
        ("in.jsonl", "{", "line 1: not JSON"),
        ("in.json", "{}", "not a list of rows"),
        ("in.csv", "a,b", "ends neither with"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: Any, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    assert main(["prepare", "jsonl", str(tmp_path / name), "--out", str(tmp_path / "out.jsonl")]) == 2
    assert message in (told := capsys.readouterr().err) and name in told


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pip install pyarrow"):
        prepare("dapo", [tmp_path / "in.parquet"], tmp_path / "out.jsonl")


def test_the_command_prints_what_it_wrote(tmp_path: Path, capsys: Any) -> None:
    given = write(tmp_path / "in.json", DAPO)
    assert main(["prepare", "dapo", str(given), "--out", str(tmp_path / "dapo.jsonl")]) == 0
    assert "2 problems; left out: 1 repeated, 1 without an integer answer" in capsys.readouterr().out
