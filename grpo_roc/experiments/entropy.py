"""The fifth of a trajectory's generated tokens with the highest entropy, sorted into kinds.

    reflection  right after a tool's answer
    forking     elsewhere in the model's reasoning: several continuations were likely
    code        inside a tool call
    answer      inside the answer

Trajectories are JSONL, from any trainer: {"tokens": [text, …], "entropies": [nats, …], "roles": [role, …]}, where a role is
"prompt", "tool" (observed) or "assistant" (generated).
"""

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from grpo_roc import config, metrics
from grpo_roc.distributed import use_device
from grpo_roc.loss import logprobs_and_entropies
from grpo_roc.metrics import mean
from grpo_roc.model import load_model, load_tokenizer
from grpo_roc.rollout import Codec, Trajectory

SHARE = 0.2
AFTER_TOOL = 8  # tokens after a tool's answer that count as reflection
COLOURS = {"forking": "#ffd54f", "reflection": "#80cbc4", "code": "#ef9a9a", "answer": "#b39ddb"}


class Tokens(msgspec.Struct):
    tokens: list[str]
    entropies: list[float]
    roles: list[str]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.entropies) == len(self.roles):
            raise ValueError("tokens, entropies and roles must have the same length")

        generated = [entropy for entropy, role in zip(self.entropies, self.roles, strict=True) if role == "assistant"]
        if len(generated) > 1 and not any(generated):
            raise ValueError("all entropies are 0; they must come from a model's forward pass")


def read(path: Path) -> list[Tokens]:
    return [msgspec.json.decode(line, type=Tokens) for line in path.read_text().splitlines() if line.strip()]


def write(path: Path, rollouts: Iterable[Trajectory], settings: config.Config, folder: Path) -> None:
    """With the entropies of a forward pass of the model in `folder`, which made the rollouts: engines do not report them."""
    codec = Codec(load_tokenizer(folder), settings.chat)
    model = load_model(folder, settings.model, use_device(settings)).eval()
    with open(path, "w") as file:
        for one in rollouts:
            ids, mask = (
                torch.tensor([row], device=model.device) for row in (one.prompt + one.ids, [0] * len(one.prompt) + one.mask)
            )
            with torch.no_grad():
                _, entropies = logprobs_and_entropies(model, ids, mask, settings.eval.temperature)
            roles = ["prompt"] * len(one.prompt) + ["assistant" if own else "tool" for own in one.mask]
            tokens = [codec.text([token]) for token in one.prompt + one.ids]
            file.write(json.dumps({"tokens": tokens, "entropies": [0.0, *entropies[0].tolist()], "roles": roles}) + "\n")


def kinds(one: Tokens) -> list[str]:
    """The kind of every token; "" if the model did not generate it."""
    found, since_tool, text = [], AFTER_TOOL, ""
    for token, role in zip(one.tokens, one.roles, strict=True):
        if role != "assistant":
            found.append("")
            since_tool, text = 0 if role == "tool" else AFTER_TOOL, ""
            continue
        text += token
        found.append(_inside(text) or ("reflection" if since_tool < AFTER_TOOL else "forking"))
        since_tool += 1
    return found


def _inside(text: str) -> str:
    for tag, name in (("tool_call", "code"), ("answer", "answer")):
        if text.rfind(f"<{tag}>") > text.rfind(f"</{tag}>"):
            return name
    return ""


def top(one: Tokens, share: float = SHARE) -> set[int]:
    """Positions of the `share` of generated tokens with the highest entropy."""
    generated = [index for index, role in enumerate(one.roles) if role == "assistant"]
    count = max(1, round(share * len(generated))) if generated else 0
    return set(sorted(generated, key=lambda index: (-one.entropies[index], index))[:count])


def table(trajectories: Sequence[Tokens]) -> dict[str, dict[str, float]]:
    """For each kind: its share of all generated tokens, its share of the high-entropy ones, and its mean entropy."""
    every: list[tuple[str, float]] = []
    highest: list[str] = []
    for one in trajectories:
        marked = kinds(one)
        every += [(kind, entropy) for kind, entropy in zip(marked, one.entropies, strict=True) if kind]
        highest += [marked[index] for index in top(one)]
    return {
        kind: {
            "of_all": mean([its == kind for its, _ in every]),
            "of_top": mean([its == kind for its in highest]),
            "entropy": mean([entropy for its, entropy in every if its == kind]),
        }
        for kind in COLOURS
    }


def markdown(found: dict[str, dict[str, float]], count: int) -> str:
    head = ["kind", "share of tokens", "share of high-entropy tokens", "enrichment", "mean entropy, nats"]
    rows = [
        [kind, row["of_all"], row["of_top"], f"{row['of_top'] / (row['of_all'] or 1):.2f}", row["entropy"]]
        for kind, row in found.items()
    ]
    title = f"High-entropy tokens (top {SHARE:.0%} of each trajectory), {count} trajectories"
    return "\n".join([title, "", *metrics.table(head, rows, 5), ""])


def page(trajectories: Sequence[Tokens]) -> str:
    """HTML: every trajectory with its high-entropy tokens coloured by kind."""
    legend = " ".join(f'<span style="background:{colour}">{kind}</span>' for kind, colour in COLOURS.items())
    body = "".join(f"<pre>{''.join(_coloured(one))}</pre><hr>" for one in trajectories)
    style = "pre{white-space:pre-wrap;font:14px monospace} .observed{color:#888} hr{border:0;border-top:1px solid #ddd}"
    return f'<!doctype html><meta charset="utf-8"><title>High-entropy tokens</title><style>{style}</style><p>{legend}</p>{body}'


def _coloured(one: Tokens) -> Iterator[str]:
    high = top(one)
    for index, (token, kind) in enumerate(zip(one.tokens, kinds(one), strict=True)):
        text = html.escape(token)
        if index in high:
            yield f'<span style="background:{COLOURS[kind]}" title="{one.entropies[index]:.2f} nats">{text}</span>'
        else:
            yield text if kind else f'<span class="observed">{text}</span>'


def report(path: Path, out: Path | None, count: int) -> str:
    trajectories = read(path)[:count]
    text = markdown(table(trajectories), len(trajectories))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "entropy.md").write_text(text)
        (out / "entropy.html").write_text(page(trajectories))
    return text
