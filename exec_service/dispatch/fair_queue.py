"""Calls that wait in the gateway's memory for a place at the workers, in a fair order.

Priorities share by weight (train 16 : eval 4 : bulk 1, so that nothing starves), within each the tenants by theirs, within each
first come, first served. Whoever had nothing waiting does not save up turns. A call whose class has no room is passed over, so
that what only few workers can run does not hold up the rest. Bulk has a room of its own within that of all, so that the others
find some even if everything that bulk has at the workers is stuck there.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable

from exec_service.dispatch.tickets import PendingJob
from exec_wire.queue.protocol import PRIORITY_WEIGHTS

LEAST_WEIGHT = 0.001
LINES_KEPT = 1000  # of tenants that have nothing waiting, per priority

CreditOf = Callable[[str], int]  # of a class: how many more may be released


class Places:
    """How many may be taken in all, and of each class, which is asked once."""

    def __init__(self, most: int, of_class: CreditOf) -> None:
        self.left, self._of_class = most, of_class
        self._left_of: dict[str, int] = {}

    def has(self, needs: str) -> bool:
        if needs not in self._left_of:
            self._left_of[needs] = self._of_class(needs)
        return self.left > 0 and self._left_of[needs] > 0

    def use(self, needs: str) -> None:
        self.left -= 1
        self._left_of[needs] -= 1


AllOf = tuple[Places, ...]  # a call needs one of each


class _Line:
    """What one tenant has waiting at one priority: per class, first come, first served."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.turn = 0.0  # grows by 1/weight with every call taken; the smallest is next
        self.listed = False
        # Not a plain dict: taking the first of a dict again and again scans the holes that the earlier ones left.
        self.jobs: dict[str, OrderedDict[PendingJob, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.jobs.values()))

    def next_class(self, places: AllOf) -> str | None:
        """Of the one that has waited longest among those with room."""
        open_classes = [needs for needs, jobs in self.jobs.items() if jobs and all(one.has(needs) for one in places)]
        return min(open_classes, key=lambda needs: next(iter(self.jobs[needs].values())), default=None)


class _Priority:
    """The tenants of one priority, in turn."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.turn = 0.0
        self.now = 0.0  # the turn of the tenant that was served last
        self.lines: dict[str, _Line] = {}
        self._lines_most = LINES_KEPT
        self._order: list[tuple[float, int, _Line]] = []  # a heap of those that have something
        self._numbers = itertools.count()

    def line_of(self, tenant: str) -> _Line:
        if tenant not in self.lines:
            if len(self.lines) >= self._lines_most:
                # Whoever had more than its share of late is remembered, lest it be first again with every new call.
                self.lines = {name: line for name, line in self.lines.items() if line.listed or line.turn > self.now}
                self._lines_most = max(LINES_KEPT, 2 * len(self.lines))
            self.lines[tenant] = _Line()
        return self.lines[tenant]

    def list(self, line: _Line) -> None:
        line.listed = True
        line.turn = max(line.turn, self.now)
        self._push(line)

    def next_line(self, places: AllOf) -> tuple[_Line, str] | None:
        """Whose turn it is, and for which class. Lines without room keep their place."""
        passed: list[_Line] = []
        found: tuple[_Line, str] | None = None
        while self._order and found is None:
            line = heapq.heappop(self._order)[2]
            if not len(line):
                line.listed = False
            elif (needs := line.next_class(places)) is None:
                passed.append(line)
            else:
                found = line, needs
        for line in passed:
            self._push(line)
        if not passed and found is None:  # nobody waits, so nobody has had too much
            self.lines, self.now = {}, 0.0
        return found

    def served(self, line: _Line) -> None:
        self.now = line.turn
        line.turn += 1 / line.weight
        self._push(line)

    def put_off(self, line: _Line) -> None:
        """It was its turn, but that of another priority was earlier."""
        self._push(line)

    def _push(self, line: _Line) -> None:
        heapq.heappush(self._order, (line.turn, next(self._numbers), line))


def same_weight(tenant: str) -> float:
    return 1.0


class FairQueue:
    def __init__(self, weight_of: Callable[[str], float] = same_weight) -> None:
        """`weight_of` a tenant is asked whenever it starts to wait anew."""
        self._tenant_weight = weight_of
        self._priorities = {name: _Priority(weight) for name, weight in PRIORITY_WEIGHTS.items()}
        self._now = 0.0  # the turn of the priority that was served last
        self._count = 0
        self._numbers = itertools.count()
        self._front = itertools.count(-1, -1)

    def __len__(self) -> int:
        return self._count

    def weight_of(self, tenant: str) -> float:
        return max(self._tenant_weight(tenant), LEAST_WEIGHT)

    def put(self, job: PendingJob) -> None:
        self._line_of(job).setdefault(job, next(self._numbers))
        self._count += 1

    def put_back(self, jobs: list[PendingJob]) -> None:
        """Return what could not be released to where it was: first in line."""
        for job in reversed(jobs):
            line = self._line_of(job)
            line[job] = next(self._front)
            line.move_to_end(job, last=False)
            self._count += 1

    def take(self, most: int, room: CreditOf, bulk: Places | None = None) -> list[PendingJob]:
        """Up to `most` of them, of each class as many as it has room for, in the order in which they shall be released.

        Those of bulk need a place in `bulk` too, if it is given.
        """
        all_ = Places(most, room)
        places: dict[str, AllOf] = dict.fromkeys(self._priorities, (all_,))
        if bulk is not None:
            places["bulk"] = all_, bulk
        taken: list[PendingJob] = []
        while all_.left > 0 and (job := self._take_next(places)) is not None:
            for one in places[job.priority]:
                one.use(job.needs)
            taken.append(job)
        self._count -= len(taken)
        return taken

    def remove(self, job: PendingJob) -> None:
        line = self._priorities[job.priority].lines.get(job.tenant)
        jobs = line.jobs.get(job.needs) if line is not None else None
        if jobs is not None and jobs.pop(job, None) is not None:
            self._count -= 1

    def _take_next(self, places: dict[str, AllOf]) -> PendingJob | None:
        best: tuple[_Priority, _Line, str] | None = None
        for name, priority in self._priorities.items():
            if (found := priority.next_line(places[name])) is None:
                priority.turn = max(priority.turn, self._now)  # who has nothing to release saves no turns
            elif best is None or priority.turn < best[0].turn:
                if best is not None:
                    best[0].put_off(best[1])
                best = priority, *found
            else:
                priority.put_off(found[0])
        if best is None:
            return None
        priority, line, needs = best
        self._now = priority.turn
        priority.turn += 1 / priority.weight
        priority.served(line)
        return line.jobs[needs].popitem(last=False)[0]

    def _line_of(self, job: PendingJob) -> OrderedDict[PendingJob, int]:
        priority = self._priorities[job.priority]
        line = priority.line_of(job.tenant)
        if not line.listed:
            line.weight = self.weight_of(job.tenant)
            priority.list(line)
        return line.jobs.setdefault(job.needs, OrderedDict())
