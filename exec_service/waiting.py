"""Calls that wait in the gateway's memory for a place at the workers: first come, first served."""

from __future__ import annotations

from collections import OrderedDict

from exec_service.flight import Flight


class Waiting:
    # Not a plain dict: taking the first of a dict again and again scans the holes that the earlier ones left.
    def __init__(self) -> None:
        self._line: OrderedDict[Flight, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def put(self, flight: Flight) -> None:
        self._line[flight] = None

    def put_back(self, flights: list[Flight]) -> None:
        """Return what could not be released to where it was: first in line."""
        for flight in reversed(flights):
            self._line[flight] = None
            self._line.move_to_end(flight, last=False)

    def take(self, most: int) -> list[Flight]:
        return [self._line.popitem(last=False)[0] for _ in range(min(most, len(self._line)))]

    def remove(self, flight: Flight) -> None:
        self._line.pop(flight, None)
