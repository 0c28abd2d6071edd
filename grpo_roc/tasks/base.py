"""What every task has, and its types."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self, TypeVar

from grpo_roc import config

T = TypeVar("T")


class Problem(NamedTuple):
    id: str
    text: str
    answer: str


class Segment(NamedTuple):
    """A part of a demonstration; `learned` marks the assistant's own text."""

    text: str
    learned: bool


class Task(ABC):
    """Stateless: the same arguments give the same problems, so a resumed run continues unchanged."""

    def __init__(self, settings: config.Task, chat: config.Chat, problems: Sequence[Problem] | None = None) -> None:
        self._settings, self._chat = settings, chat
        self.pool = problems or self._make_pool()

    def with_problems(self, problems: Sequence[Problem]) -> Self:
        return type(self)(self._settings, self._chat, problems)

    def batch(self, seed: int, step: int, count: int) -> list[Problem]:
        return passes(self.pool, seed, step, count)

    @abstractmethod
    def _make_pool(self) -> Sequence[Problem]: ...
    @abstractmethod
    def benchmarks(self, count: int) -> dict[str, list[Problem]]:
        """Up to `count` test problems of each benchmark. No choice during training may depend on them."""

    @abstractmethod
    def validation(self) -> list[Problem]:
        """Problems that choose the best policy and end stages: neither trained on nor part of a benchmark."""

    @abstractmethod
    def demonstrations(self, seed: int, step: int, count: int) -> list[list[Segment]]: ...
    @property
    @abstractmethod
    def texts(self) -> list[str]:
        """Texts whose words get tokens of their own."""


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
