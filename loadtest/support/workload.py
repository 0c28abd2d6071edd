"""Which programs a measurement runs: a seeded mix of the project's own templates, or another module's `calls(n, seed, mix)`.

Mixes as in RL rollouts of a math model: `rollout`, `std` (standard library only), `slow` (with 2 % that never end). The share
of each kind is exact, not drawn, and so is that of each template within its kind: two parts of a workload cost the same.

    python -m loadtest.workload 1000 --seed 7 --mix rollout > calls.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from loadtest.programs import TEMPLATES, Template

MIXES: dict[str, dict[str, int]] = {
    "rollout": {"std": 45, "sympy": 30, "numpy": 15, "scipy": 5, "error": 5},
    "std": {"std": 1},
    "slow": {"std": 44, "sympy": 30, "numpy": 14, "scipy": 5, "error": 5, "endless": 2},
}

WALL_S, ENDLESS_WALL_S = 10.0, 1.0  # a program that never ends is not worth ten seconds of everybody's time


class Program(Struct, frozen=True):
    """One call of a workload."""

    kind: str
    code: str
    stdin: str = ""
    name: str = ""  # of the template
    wall_s: float = WALL_S


Calls = Callable[[int, int, str], list[Program]]


def calls(n: int, seed: int = 0, mix: str = "rollout") -> list[Program]:
    """`n` programs in random order; the same for the same seed, on every machine."""
    rng = random.Random(f"{mix} {seed}")
    programs = []
    for kind, count in shares(n, MIXES[mix]).items():
        order = rng.sample(TEMPLATES[kind], len(TEMPLATES[kind]))
        programs += [_program(kind, template, rng) for template in islice(cycle(order), count)]
    rng.shuffle(programs)
    return programs


def shares(n: int, weights: dict[str, int]) -> dict[str, int]:
    """How many of `n` each kind gets: whole numbers, the largest remainders rounded up."""
    total = sum(weights.values())
    counts = {kind: n * weight // total for kind, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda kind: -(n * weights[kind] % total))
    for kind in by_remainder[: n - sum(counts.values())]:
        counts[kind] += 1
    return counts


def _program(kind: str, template: Template, rng: random.Random) -> Program:
    return Program(kind, *template.fill(rng), template.name, _wall_s(kind))


def _wall_s(kind: str) -> float:
    return ENDLESS_WALL_S if kind == "endless" else WALL_S


class Workload(Struct, frozen=True):
    """Where programs come from, and what to call it in a report."""

    name: str
    calls: Calls

    @classmethod
    def own(cls) -> Workload:
        return cls("loadtest.workload", calls)

    @classmethod
    def from_file(cls, path: Path) -> Workload:
        """A module with `calls(n, seed, mix)`, which gives objects with `kind`, `code` and `stdin`."""
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def foreign(n: int, seed: int, mix: str) -> list[Program]:
            return [_foreign_program(call) for call in module.calls(n, seed=seed, mix=mix)]

        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        return cls(f"{path.name} (sha256 {digest})", foreign)


def _foreign_program(call: dict[str, Any]) -> Program:
    kind = str(call.get("kind", ""))
    return Program(kind, call["code"], call.get("stdin", ""), "", _wall_s(kind))


def deal(programs: Iterable[Program], parts: int, seed: int) -> list[list[Program]]:
    """The programs in `parts` parts of like composition, each in random order."""
    rng = random.Random(f"deal {seed}")
    alike = sorted(programs, key=lambda program: (program.kind, program.name))
    dealt = [alike[part::parts] for part in range(parts)]
    for part in dealt:
        rng.shuffle(part)
    return dealt


def main() -> None:
    parser = argparse.ArgumentParser(description="Print programs of the workload, one JSON object per line.")
    parser.add_argument("n", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", choices=MIXES, default="rollout")
    options = parser.parse_args()
    for program in calls(options.n, options.seed, options.mix):
        print(msgspec.json.encode(program).decode())


if __name__ == "__main__":
    main()
