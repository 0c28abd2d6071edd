"""The reference workload, a seeded mix of this project's templates; or the programs of another module's `calls(n, seed, mix)`.

The templates are the short programs that a math model writes when it has a Python tool. `programs/KIND.txt` has those of one
kind: a line `=== name a=2:12 b=150:800` starts a template, and its `$a` and `$b` are replaced by numbers drawn from these
ranges; `integers=80` puts 80 random integers on one line of standard input, after the line `stdin=…`. Every program is
deterministic, also with another hash seed.

Mixes as in RL rollouts of a math model: `rollout`, `std` (standard library only), `slow` (with 2 % endless programs). The share
of each kind, and of each template within its kind, is exact and not drawn: two parts of a workload cost the same.
"""

import hashlib
import random
import re
import runpy
import string
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

MIXES: dict[str, dict[str, int]] = {
    "rollout": {"std": 45, "sympy": 30, "numpy": 15, "scipy": 5, "error": 5},
    "std": {"std": 1},
    "slow": {"std": 44, "sympy": 30, "numpy": 14, "scipy": 5, "error": 5, "endless": 2},
}
STATUS_OF_KIND = {"error": "error", "endless": "timeout"}  # in a plain interpreter; the other kinds end with "ok"
WALL_S, ENDLESS_WALL_S = 10.0, 1.0


class Template(Struct, frozen=True):
    name: str
    code: str
    numbers: dict[str, range] = {}
    stdin: str = ""
    stdin_integers: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        head, _, code = text.partition("\n")
        head, _, stdin = head.partition(" stdin=")
        name, *fields = head.split()
        values = dict(field.split("=") for field in fields)
        integers = int(values.pop("integers", 0))
        numbers = {key: range(*map(int, value.split(":"))) for key, value in values.items()}
        return cls(name, code, numbers, f"{stdin}\n" if stdin else "", integers)

    def fill(self, rng: random.Random) -> tuple[str, str]:
        """Code and standard input for one draw of the numbers."""
        drawn = {name: rng.choice(numbers) for name, numbers in self.numbers.items()}
        integers = " ".join(str(rng.randrange(-500, 2000)) for _ in range(self.stdin_integers))
        stdin = string.Template(self.stdin).substitute(drawn)
        return string.Template(self.code).substitute(drawn), f"{stdin}{integers}\n" if stdin or integers else ""


def _templates(kind: str) -> list[Template]:
    text = Path(__file__).with_name("programs").joinpath(f"{kind}.txt").read_text()
    return [Template.parse(one) for one in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]]


TEMPLATES = {kind: _templates(kind) for kind in MIXES["slow"]}


class Program(Struct, frozen=True):
    """One call of a workload."""

    kind: str
    code: str
    stdin: str = ""
    name: str = ""  # of the template
    wall_s: float = WALL_S


Calls = Callable[[int, int, str], list[Program]]


def calls(n: int, seed: int = 0, mix: str = "rollout") -> list[Program]:
    """`n` programs in random order; the same seed gives the same programs on every machine."""
    rng = random.Random(f"{mix} {seed}")
    programs = []
    for kind, count in shares(n, MIXES[mix]).items():
        order = rng.sample(TEMPLATES[kind], len(TEMPLATES[kind]))
        programs += [
            Program(kind, *template.fill(rng), template.name, _wall_s(kind)) for template in islice(cycle(order), count)
        ]
    rng.shuffle(programs)
    return programs


def shares(n: int, weights: dict[str, int]) -> dict[str, int]:
    """How many of `n` calls each kind gets: whole numbers, the largest remainders rounded up."""
    total = sum(weights.values())
    counts = {kind: n * weight // total for kind, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda kind: -(n * weights[kind] % total))
    for kind in by_remainder[: n - sum(counts.values())]:
        counts[kind] += 1
    return counts


def _wall_s(kind: str) -> float:
    return ENDLESS_WALL_S if kind == "endless" else WALL_S


class Workload(Struct, frozen=True):
    """A source of programs, and its name in reports."""

    name: str
    calls: Calls

    @classmethod
    def own(cls) -> Self:
        return cls("the programs of `loadtest`", calls)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """A module with `calls(n, seed, mix)`, which returns dicts with `kind`, `code` and `stdin`."""
        module = runpy.run_path(str(path))

        def foreign(n: int, seed: int, mix: str) -> list[Program]:
            return [_foreign_program(call) for call in module["calls"](n, seed=seed, mix=mix)]

        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        return cls(f"{path.name} (sha256 {digest})", foreign)


def _foreign_program(call: dict[str, Any]) -> Program:
    kind = str(call.get("kind", ""))
    return Program(kind, call["code"], call.get("stdin", ""), "", _wall_s(kind))


def deal(programs: Iterable[Program], parts: int, seed: int) -> list[list[Program]]:
    """Split the programs into `parts` parts of like composition, each in random order."""
    rng = random.Random(f"deal {seed}")
    alike = sorted(programs, key=lambda program: (program.kind, program.name))
    dealt = [alike[part::parts] for part in range(parts)]
    for part in dealt:
        rng.shuffle(part)
    return dealt
