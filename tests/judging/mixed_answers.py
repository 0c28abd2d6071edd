"""A thousand answers and truths of many kinds, right and wrong ones, the same each time.

A kind of mixed_answers.txt makes two expressions; `_wrapped` puts the answer into words as a model would. Whether they are
equal is not said here.
"""

import math
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

NAMES = ["Evelyn", "Carla", "Briana", "Monday", "odd", "even", "ellipse", "east", "no solution", "yes"]
UNITS = [r"\text{ cm}", r"\text{ km/h}", r"\ \mathrm{m}^2", r"^\circ", r"\text{ dollars}", r"\,\text{kg}", r" \text{ hours}"]


class Kind(NamedTuple):
    values: str
    answers: list[str]
    truths: list[str]


class Pair(NamedTuple):
    kind: str
    answer: str
    truth: str
    same_text: bool  # Math-Verify gets the very same texts whichever way the service extracts the answer


def mixed(count: int, seed: int = 20_000) -> list[Pair]:
    """`count` different pairs; each kind as often as every other."""
    rng = random.Random(seed)
    names = list(KINDS)
    pairs: dict[tuple[str, str], Pair] = {}
    for turn in range(50 * count):
        if len(pairs) == count:
            return list(pairs.values())
        pair = _made(names[turn % len(names)], rng)
        pairs.setdefault((pair.answer, pair.truth), pair)
    raise ValueError(f"there are no {count} different pairs")


def _made(kind: str, rng: random.Random) -> Pair:
    answer, truth = _drawn(KINDS[kind], rng)
    if kind in AS_THEY_ARE:
        return Pair(kind, answer, truth, False)
    return Pair(
        kind, _wrapped(answer, rng), rng.choice([f"${truth}$", f"${truth}$", rf"\boxed{{{truth}}}", rf"\[{truth}\]"]), True
    )


def _wrapped(answer: str, rng: random.Random) -> str:
    return rng.choice(
        [
            rf"\boxed{{{answer}}}",
            rf"Therefore the final answer is $\boxed{{{answer}}}$.",
            f"We add the {rng.randint(2, 9)} terms and simplify.\n\n**Final answer**: \\boxed{{{answer}}}",
            rf"\[ \boxed{{ {answer} }} \]",
            f"${answer}$",
            f"So the answer is ${answer}$.",
            rf"Hence \({answer}\)",
            f"$${answer}$$",
        ]
    )


def _load() -> dict[str, Kind]:
    """The kinds of mixed_answers.txt, by name."""
    blocks = Path(__file__).with_suffix(".txt").read_text().split("\n\n")[1:]
    return {lines[0].strip("[]"): _parsed(lines[1:]) for lines in map(str.splitlines, blocks)}


def _parsed(lines: list[str]) -> Kind:
    def marked(mark: str) -> list[str]:
        return [text.strip() for line in lines if line[0] == mark for text in line[1:].split("¦")]

    return Kind("\n".join(line for line in lines if line[0] not in ">="), marked(">"), marked("="))


def _drawn(kind: Kind, rng: random.Random) -> tuple[str, str]:
    def near(number: int) -> int:
        return number if rng.random() < 0.6 else number + rng.choice([-2, -1, 1, 2, 10])

    def n(most: int = 20) -> int:
        return rng.randint(1, most)

    def one_of(templates: list[str]) -> str:
        made = [re.sub("«(.*?)»", lambda found: str(eval(f"f'''{{{found[1]}}}'''", scope)), text) for text in templates]
        return made[0] if len(made) == 1 else rng.choice(made)

    draws = {name: getattr(rng, name) for name in ("choice", "randint", "random", "sample", "shuffle", "uniform")}
    scope: dict[str, Any] = {"math": math, "NAMES": NAMES, "UNITS": UNITS, "near": near, "n": n, **draws}
    exec(kind.values, scope)
    return one_of(kind.answers), one_of(kind.truths)


AS_THEY_ARE = {"boxes_in_prose", "plain_prose", "bare_expressions", "malformed", "malformed_truths"}
KINDS = _load()
