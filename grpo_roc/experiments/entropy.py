"""Where a policy is unsure: the fifth of a trajectory's tokens with the highest entropy, sorted into kinds.

    reflection  right after a tool's answer: the model makes up its mind about what it has seen
    forking     elsewhere in what the model thinks: it could have gone another way
    code        inside a tool call
    answer      inside the answer

Trajectories are JSONL, from any trainer: {"tokens": [text, …], "entropies": [nats, …], "roles": [role, …]}, where a role is
"prompt", "tool" (heard) or "assistant" (said). Only what was said is looked at.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from grpo_roc.rollout import Codec, Trajectory

KINDS = ("forking", "reflection", "code", "answer")
SHARE = 0.2
AFTER_TOOL = 8  # so many tokens after a tool's answer are a reflection on it
COLOURS = {"forking": "#ffd54f", "reflection": "#80cbc4", "code": "#ef9a9a", "answer": "#b39ddb"}


class Tokens(msgspec.Struct):
    tokens: list[str]
    entropies: list[float]
    roles: list[str]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.entropies) == len(self.roles):
            raise ValueError("tokens, entropies and roles must have the same length")


def read(path: Path) -> list[Tokens]:
    return [msgspec.json.decode(line, type=Tokens) for line in path.read_text().splitlines() if line.strip()]


def write(path: Path, rollouts: Iterable[Trajectory], codec: Codec) -> None:
    with open(path, "w") as file:
        for one in rollouts:
            roles = ["prompt"] * len(one.prompt) + ["assistant" if own else "tool" for own in one.mask]
            tokens = [codec.text([token]) for token in one.prompt + one.ids]
            row = {"tokens": tokens, "entropies": [0.0] * len(one.prompt) + one.entropies, "roles": roles}
            file.write(json.dumps(row) + "\n")


def kinds(one: Tokens) -> list[str]:
    """Of every token; "" for what was not said."""
    found, inside, since_tool, text = [], "", AFTER_TOOL, ""
    for token, role in zip(one.tokens, one.roles, strict=True):
        if role != "assistant":
            found.append("")
            inside, since_tool, text = "", 0 if role == "tool" else AFTER_TOOL, ""
            continue
        text += token
        inside = _inside(text)
        found.append(inside or ("reflection" if since_tool < AFTER_TOOL else "forking"))
        since_tool += 1
    return found


def _inside(text: str) -> str:
    for tag, name in (("tool_call", "code"), ("answer", "answer")):
        if text.rfind(f"<{tag}>") > text.rfind(f"</{tag}>"):
            return name
    return ""


def top(one: Tokens, share: float = SHARE) -> set[int]:
    """Positions of the most uncertain `share` of what was said."""
    said = [place for place, role in enumerate(one.roles) if role == "assistant"]
    count = max(1, round(share * len(said))) if said else 0
    return set(sorted(said, key=lambda place: (-one.entropies[place], place))[:count])


def table(trajectories: Sequence[Tokens]) -> dict[str, dict[str, float]]:
    """For each kind: its share of all tokens that were said, of the most uncertain ones, and its mean entropy."""
    rows = [row for one in trajectories for row in _marked(one)]
    marked = [row for row in rows if row[2]]
    return {
        kind: {
            "of_all": _share(rows, kind),
            "of_top": _share(marked, kind),
            "entropy": _mean([entropy for its, entropy, _ in rows if its == kind]),
        }
        for kind in KINDS
    }


def _marked(one: Tokens) -> Iterator[tuple[str, float, bool]]:
    high = top(one)
    for place, kind in enumerate(kinds(one)):
        if kind:
            yield kind, one.entropies[place], place in high


def _share(rows: Sequence[tuple[str, float, bool]], kind: str) -> float:
    return sum(row[0] == kind for row in rows) / len(rows) if rows else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def markdown(found: dict[str, dict[str, float]], count: int) -> str:
    head = f"High-entropy tokens (top {SHARE:.0%} of each trajectory), {count} trajectories\n\n"
    head += (
        "| kind | share of tokens | share of high-entropy tokens | enrichment | mean entropy, nats |\n" + "| --- " * 5 + "|\n"
    )
    return head + "".join(
        f"| {kind} | {row['of_all']:.3f} | {row['of_top']:.3f} | {row['of_top'] / (row['of_all'] or 1):.2f} | "
        f"{row['entropy']:.3f} |\n"
        for kind, row in found.items()
    )


def page(trajectories: Sequence[Tokens]) -> str:
    """Every trajectory with its uncertain tokens coloured by kind."""
    legend = " ".join(f'<span style="background:{colour}">{kind}</span>' for kind, colour in COLOURS.items())
    body = "".join(f"<pre>{''.join(_coloured(one))}</pre><hr>" for one in trajectories)
    style = "pre{white-space:pre-wrap;font:14px monospace} .heard{color:#888} hr{border:0;border-top:1px solid #ddd}"
    return f'<!doctype html><meta charset="utf-8"><title>High-entropy tokens</title><style>{style}</style><p>{legend}</p>{body}'


def _coloured(one: Tokens) -> Iterator[str]:
    high = top(one)
    for place, (token, kind) in enumerate(zip(one.tokens, kinds(one), strict=True)):
        text = html.escape(token)
        if place in high:
            yield f'<span style="background:{COLOURS[kind]}" title="{one.entropies[place]:.2f} nats">{text}</span>'
        else:
            yield text if kind else f'<span class="heard">{text}</span>'


def report(path: Path, out: Path | None, count: int) -> str:
    trajectories = read(path)[:count]
    found: Any = table(trajectories)
    words = markdown(found, len(trajectories))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "entropy.md").write_text(words)
        (out / "entropy.html").write_text(page(trajectories))
    return words
