"""The metrics of a step: a row in metrics.csv and metrics.jsonl, in TensorBoard if installed, and a line for the terminal."""

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_roc.roc import format_penalty, tool_error_share
from grpo_roc.rollout import Trajectory


class Metrics:
    """The rows of one run. On resume, rows from `first_step` on are dropped, because those steps run again."""

    def __init__(self, folder: Path, *, first_step: int = 0, board: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._csv, self._jsonl = folder / "metrics.csv", folder / "metrics.jsonl"
        self.rows = [row for row in read(folder) if row["step"] < first_step]
        self._jsonl.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._board = _board(folder) if board else None

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with open(self._jsonl, "a") as file:
            file.write(json.dumps(row) + "\n")
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        fresh = self._csv.with_suffix(".new")
        with open(fresh, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows)
        fresh.rename(self._csv)
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def read(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the process was killed while writing it; the step runs again
            break
    return rows


def of_rollouts(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Shares and means over the rollouts that have a reward."""
    known = [one for one in rollouts if one.reward is not None]
    correct = [one for one in known if one.correct]
    lengths = sorted(one.tokens for one in known)
    return {
        "reward/mean": mean([one.reward or 0.0 for one in known]),
        "err_in_pos": error_share(correct),
        "err_all": error_share(known),
        "calls/rollout": mean([len(one.outcomes) for one in known]),
        "calls": float(sum(len(one.outcomes) for one in rollouts)),
        "no_tool": mean([not one.outcomes for one in known]),
        "answers>1": mean([one.answers > 1 for one in known]),
        "answers>1_in_pos": mean([one.answers > 1 for one in correct]),
        "len/mean": mean(lengths),
        "len/p95": float(lengths[int(0.95 * (len(lengths) - 1))]) if lengths else 0.0,
        "clip_ratio": mean([one.truncated for one in known]),
        "turns": mean([one.turns for one in known]),
        "infra": float(len(rollouts) - len(known)),
    }


def error_share(rollouts: Sequence[Trajectory]) -> float:
    """The share of tool calls that failed by the model's fault."""
    outcomes = [outcome for one in rollouts for outcome in one.outcomes if outcome != "infra"]
    return mean([outcome == "error" for outcome in outcomes])


def penalties(rollouts: Sequence[Trajectory]) -> tuple[float, float]:
    """Mean p_err and p_format of the correct rollouts."""
    correct = [one for one in rollouts if one.correct]
    return (
        mean([tool_error_share(one.outcomes) for one in correct]),
        mean([format_penalty(one.answers, one.turns) for one in correct]),
    )


def line(row: dict[str, Any]) -> str:
    """`R .71 err+ .18 len 44 mixed 13/16 tool 391 @ 512/s`"""
    groups = int(row["groups/mixed"] + row["groups/all0"] + row["groups/all1"])
    return (
        f"R {row['reward/mean']:.2f} err+ {row['err_in_pos']:.2f} len {row['len/mean']:.0f} "
        f"mixed {int(row['groups/mixed'])}/{groups} tool {int(row['calls'])} @ {row['service/rps']:.0f}/s"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """The lines of a Markdown table. Floats get three digits; all but the first `left` columns are aligned to the right."""
    cells = ([f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
