"""The protocol of a task, and its types."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Problem(NamedTuple):
    id: str
    text: str
    answer: str


class Segment(NamedTuple):
    """A part of a demonstration; `learned` marks the assistant's own text."""

    text: str
    learned: bool


class Task(Protocol):
    """Stateless: the same arguments give the same problems, so a resumed run continues unchanged."""

    def batch(self, seed: int, step: int, count: int) -> list[Problem]: ...
    def heldout(self, count: int) -> list[Problem]: ...
    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]: ...
    def with_problems(self, problems: Sequence[Problem]) -> Task: ...
    @property
    def pool(self) -> Sequence[Problem]: ...
    @property
    def texts(self) -> list[str]: ...


def passes(items: Sequence[T], seed: int, step: int, count: int) -> list[T]:
    """The step's `count` items; every pass over all items has a new order."""
    if not items:
        raise ValueError("the task has no problems")
    orders: dict[int, list[int]] = {}
    found = []
    for number in range(step * count, step * count + count):
        epoch, place = divmod(number, len(items))
        if epoch not in orders:
            orders[epoch] = list(range(len(items)))
            random.Random(f"{seed}:{epoch}").shuffle(orders[epoch])
        found.append(items[orders[epoch][place]])
    return found
