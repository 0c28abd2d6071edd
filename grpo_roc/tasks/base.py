"""Problems, and where they come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Problem(NamedTuple):
    id: str
    text: str
    answer: str


class Segment(NamedTuple):
    """A part of a demonstration; only what the model says is learned."""

    text: str
    learned: bool


class Task(Protocol):
    """Stateless: the same arguments give the same problems, so that a resumed run goes on where it was."""

    def batch(self, seed: int, step: int, count: int) -> list[Problem]: ...
    def heldout(self, count: int) -> list[Problem]: ...
    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]: ...
    def with_problems(self, problems: Sequence[Problem]) -> Task: ...
    @property
    def pool(self) -> Sequence[Problem]: ...
    @property
    def texts(self) -> list[str]: ...


def passes(problems: Sequence[Problem], seed: int, step: int, count: int) -> list[Problem]:
    """`count` of them, going through all in a new order each time."""
    if not problems:
        raise ValueError("there are no problems to draw from")
    first = step * count
    orders: dict[int, list[int]] = {}

    def order(epoch: int) -> list[int]:
        if epoch not in orders:
            orders[epoch] = list(range(len(problems)))
            random.Random(f"{seed}:{epoch}").shuffle(orders[epoch])
        return orders[epoch]

    places = (divmod(number, len(problems)) for number in range(first, first + count))
    return [problems[order(epoch)[place]] for epoch, place in places]
