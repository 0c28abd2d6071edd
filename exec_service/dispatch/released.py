"""Calls that are with the workers: which, since when, and how many of each class; those of bulk jobs are counted apart too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from exec_service.dispatch.call_table import Flight


class Released:
    def __init__(self) -> None:
        self._since: dict[Flight, float] = {}
        self._count: Counter[str] = Counter()
        self._bulk: Counter[str] = Counter()
        self.bulk = 0

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, flight: Flight) -> bool:
        return flight in self._since

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._since)

    def of_class(self, needs: str) -> int:
        return self._count[needs]

    def bulk_of_class(self, needs: str) -> int:
        return self._bulk[needs]

    def before(self, at: float) -> list[Flight]:
        """What was released earlier than that."""
        return [flight for flight, since in self._since.items() if since < at]

    def add(self, flight: Flight, at: float) -> None:
        self._since[flight] = at
        self._note(flight, 1)

    def remove(self, flight: Flight) -> bool:
        """Whether it was there."""
        if self._since.pop(flight, None) is None:
            return False
        self._note(flight, -1)
        return True

    def _note(self, flight: Flight, change: int) -> None:
        self._count[flight.needs] += change
        if flight.priority == "bulk":
            self._bulk[flight.needs] += change
            self.bulk += change
