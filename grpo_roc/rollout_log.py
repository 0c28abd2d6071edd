"""The format of `rollouts/` in a run's folder: what was rolled out at every step, and why it was kept or dropped.

    rollouts/settings.json     of the run
    rollouts/00000012.jsonl    step 12; only ever appended to
        {"kind": "step", "format": 1, …}        first line: the step and the rule of the selection
        {"kind": "group", …}                    a problem, and the counts of its rollouts
        {"kind": "rollout", …}                  one of its rollouts, with text, log-probability and entropy of every token

`recorder.py` writes it and `view` reads it. The last line may be incomplete while a run goes on or after it was killed.
"""

from pathlib import Path
from typing import Literal

import msgspec

FORMAT = 1
FOLDER, SETTINGS = "rollouts", "settings.json"
# kept: trained on. not_drawn: the selection took others. equal: all rewards of the group are equal. unknown: no reward.
Verdict = Literal["kept", "not_drawn", "equal", "unknown"]


class Step(msgspec.Struct, tag_field="kind", tag="step"):
    step: int
    written: float  # seconds since 1970
    arm: str
    rule: str  # how correct rollouts are drawn: inverse, topk, uniform, or all
    eps: float  # weight of a correct rollout: 1 / (penalty + eps)
    groups: int  # of the step; fewer are recorded if they need more than `record.step_mb`
    format: int = FORMAT


class Group(msgspec.Struct, tag_field="kind", tag="group"):
    group: int
    problem: str
    truth: str
    prompt: str
    prompt_tokens: int
    negative: int
    positive: int
    unknown: int
    kept_negative: int
    kept_positive: int


class Call(msgspec.Struct):
    outcome: str  # ok, error, infra; empty: it was not run
    status: str
    code: str = ""
    stdin: str = ""
    failure: str = ""  # why it could not be parsed


class Part(msgspec.Struct):
    """One turn of the model, or what its tools returned. `entropies` and `logprobs` have an entry per token of the model."""

    role: Literal["model", "tool"]
    tokens: list[str]
    logprobs: list[float] = []
    entropies: list[float] = []
    calls: list[Call] = []


class Summary(msgspec.Struct, tag_field="kind", tag="rollout"):
    """A rollout without its parts."""

    group: int
    sample: int
    verdict: Verdict
    reward: float | None
    advantage: float | None
    tokens: int
    turns: int
    answers: int
    truncated: bool
    outcomes: list[str]
    p_err: float
    p_format: float
    weights: int  # their version when its first turn began
    tool_wait_s: float
    entropy_from: Literal["trainer", "engine", ""]


class Rollout(Summary, tag_field="kind", tag="rollout"):
    parts: list[Part] = []


def path(run: Path, step: int) -> Path:
    return run / FOLDER / f"{step:08d}.jsonl"


def steps(run: Path) -> list[int]:
    return sorted(int(file.stem) for file in (run / FOLDER).glob("*.jsonl") if file.stem.isdigit())
