"""Jobs that wait in the gateway's memory for credit, in a fair order.

Priorities share by weight (train 16 : eval 4 : bulk 1, so that nothing starves), within each the tenants by theirs, within each
first come, first served. A priority or tenant that had nothing waiting does not save up turns. A job whose class has no credit
is passed over, so that jobs that only few workers can run do not hold up the rest. Bulk has a credit of its own within that of
all, so that the others find some even if everything that bulk has at the workers is stuck there.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from exec_service.dispatch.tickets import PendingJob
from exec_wire.queue.protocol import PRIORITY_WEIGHTS

LEAST_WEIGHT = 0.001
LINES_KEPT = 1000  # of tenants that have nothing waiting, per priority

_by_turn = attrgetter("turn")
_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Credit:
    """How many jobs may be released: in all, and of each class."""

    most: int
    of: dict[str, int]


@dataclass(eq=False, slots=True)
class _Line:
    """The jobs that one tenant has waiting at one priority: per class, first come, first served."""

    weight: float = 1.0
    turn: float = 0.0  # grows by 1/weight with every job taken; the smallest is next
    listed: bool = False
    # Not a plain dict: taking the first of a dict again and again scans the holes that the earlier ones left.
    jobs: dict[str, OrderedDict[PendingJob, int]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Priority:
    """The tenants of one priority, in turn."""

    weight: float
    turn: float = 0.0
    now: float = 0.0  # the turn of the tenant that was served last
    lines: dict[str, _Line] = field(default_factory=dict)
    lines_most: int = LINES_KEPT
    order: list[tuple[float, int, _Line]] = field(default_factory=list)  # a heap of the lines that have jobs


class FairQueue:
    def __init__(self, weight_of: Callable[[str], float] | None = None) -> None:
        """`weight_of` a tenant is asked whenever it starts to wait; without it all weigh the same."""
        self.tenant_weight = weight_of
        self._priorities = {name: _Priority(weight) for name, weight in PRIORITY_WEIGHTS.items()}
        self._now = 0.0  # the turn of the priority that was served last
        self.count = 0  # without those that are parked
        self.classes: set[str] = set()  # of the jobs that were put since the queue was empty
        self._front = itertools.count(-1, -1)
        self.parked: dict[tuple[str, str], OrderedDict[PendingJob, None]] = {}  # by shard and class: cannot be released now

    def __len__(self) -> int:
        return self.count + sum(map(len, self.parked.values()))

    def weight_of(self, tenant: str) -> float:
        return 1.0 if self.tenant_weight is None else max(self.tenant_weight(tenant), LEAST_WEIGHT)

    def put(self, job: PendingJob, number: int | None = None) -> None:
        """`number`: of its place in line; the last one by default."""
        priority, tenant = self._priorities[job.priority], job.tenant
        line = priority.lines.get(tenant)
        if line is None:
            if len(priority.lines) >= priority.lines_most:
                # A tenant that recently had more than its share is remembered, so that it is not first again with a new job.
                priority.lines = {name: one for name, one in priority.lines.items() if one.listed or one.turn > priority.now}
                priority.lines_most = max(LINES_KEPT, 2 * len(priority.lines))
            line = priority.lines[tenant] = _Line()
        if not line.listed:
            line.listed = True
            line.weight = 1.0 if self.tenant_weight is None else self.weight_of(tenant)
            line.turn = max(line.turn, priority.now)
            heapq.heappush(priority.order, (line.turn, next(_numbers), line))
        jobs = line.jobs.get(job.needs)
        if jobs is None:
            jobs = line.jobs[job.needs] = OrderedDict()
        jobs[job] = next(_numbers) if number is None else number
        self.classes.add(job.needs)
        self.count += 1

    def put_back(self, jobs: list[PendingJob]) -> None:
        """Return jobs that could not be released to where they were: first in line."""
        for job in reversed(jobs):
            self.put(job, next(self._front))
            self._priorities[job.priority].lines[job.tenant].jobs[job.needs].move_to_end(job, last=False)

    def take(self, credit: Credit, bulk: Credit | None = None) -> PendingJob | None:
        """The next job that there is credit for. Uses up its credit, for a job of bulk also that of `bulk`, if it is given."""
        if credit.most <= 0 or not self.count:
            return None
        for priority in sorted(self._priorities.values(), key=_by_turn):
            needed = (credit, bulk) if bulk is not None and priority is self._priorities["bulk"] else (credit,)
            with_jobs, fitting = list[_Line](), list[str]()  # the lines in turn; the classes of the last one that have credit
            while priority.order and not fitting:
                line = heapq.heappop(priority.order)[2]
                first = sorted((next(iter(jobs.values())), needs) for needs, jobs in line.jobs.items() if jobs)
                line.listed = bool(first)
                with_jobs += [line] if first else []
                fitting = [needs for _, needs in first if all(one.most > 0 and one.of.get(needs, 0) > 0 for one in needed)]
            if fitting:
                self._now, priority.now = priority.turn, line.turn
                priority.turn += 1 / priority.weight
                line.turn += 1 / line.weight  # the lines before it keep their turn
            for passed in with_jobs:
                heapq.heappush(priority.order, (passed.turn, next(_numbers), passed))
            if fitting:
                break
            priority.turn = max(priority.turn, self._now)  # a priority without jobs to release saves no turns
            if not with_jobs:
                priority.lines, priority.now = {}, 0.0
        else:
            return None
        for one in needed:
            one.most -= 1
            one.of[fitting[0]] -= 1
        job, _ = line.jobs[fitting[0]].popitem(last=False)
        self.count -= 1
        if not self.count:  # nobody waits, so nobody has had too much
            for priority in self._priorities.values():
                priority.lines, priority.order, priority.now = {}, [], 0.0
            self.classes.clear()
        return job

    def park(self, job: PendingJob, shard: str) -> None:
        """Set a job aside that was taken: its shard (any, if empty) is not open for its class."""
        self.parked.setdefault((shard, job.needs), OrderedDict())[job] = None

    def unpark(self, is_open: Callable[[str, str], bool]) -> None:
        """Put those jobs back, first in line, whose shard is open again."""
        for key in [key for key in self.parked if is_open(*key)]:
            self.put_back(list(self.parked.pop(key)))

    def remove(self, job: PendingJob) -> None:
        for jobs in self.parked.values():
            if job in jobs:
                del jobs[job]
                return
        line = self._priorities[job.priority].lines.get(job.tenant)
        waiting = line.jobs.get(job.needs) if line is not None else None
        if waiting is not None and waiting.pop(job, None) is not None:
            self.count -= 1
