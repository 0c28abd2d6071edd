"""Statistics for `GET /v1/stats`: the last two minutes second by second, recent failures, recent training runs by step.

They live in this process's memory, which is bounded whatever callers send. Prometheus keeps the history (`telemetry.metrics`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2

import msgspec

from exec_wire.messages.calls import Blame, Result, Tags
from exec_wire.messages.stats import Failure, Quantiles, RunStats, RunSummary, SecondStats, StepStats, TenantShare

SECONDS_KEPT = 120
WINDOW_S = 60
RUNS_KEPT = 20
STEPS_KEPT = 500  # per run
TENANTS_KEPT = 100  # per second
FAILURES_KEPT = 50  # of the service, and as many of programs, which must not displace the few of the service
STAGES = ("queue", "start", "run", "total")
EMPTY_SECOND = SecondStats()
_PER_OCTAVE = 8


@dataclass(eq=False, slots=True)
class Sketch:
    """A histogram whose buckets grow by 9 %, so that a quantile is within 5 % of its value."""

    counts: Counter[int] = field(default_factory=Counter)
    most: float = 0.0

    def merge(self, other: Sketch) -> None:
        self.counts.update(other.counts)
        self.most = max(self.most, other.most)

    def quantiles(self) -> Quantiles:
        if not self.counts:
            return Quantiles()
        buckets = sorted(self.counts)
        ranks = list(accumulate(self.counts[bucket] for bucket in buckets))
        found = (buckets[bisect_left(ranks, share * ranks[-1])] for share in (0.5, 0.9, 0.99))
        p50, p90, p99 = (round(min(2 ** (bucket / _PER_OCTAVE), self.most), 3) for bucket in found)
        return Quantiles(p50, p90, p99, round(self.most, 3))


@dataclass(eq=False, slots=True)
class Second:
    at: int
    stages: dict[str, Sketch] = field(default_factory=lambda: {stage: Sketch() for stage in STAGES})
    blames: Counter[Blame] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)  # by tenant
    slot_ms: dict[str, float] = field(default_factory=dict)  # by tenant

    def merge(self, other: Second) -> None:
        for stage, sketch in other.stages.items():
            self.stages[stage].merge(sketch)
        self.blames.update(other.blames)
        self.calls.update(other.calls)
        for tenant, ms in other.slot_ms.items():
            self.slot_ms[tenant] = self.slot_ms.get(tenant, 0.0) + ms

    def stats(self) -> SecondStats:
        total = self.stages["total"].quantiles()
        counts = {blame: self.blames[blame] for blame in ("none", "model", "infra", "client")}
        return SecondStats(**counts, p50_ms=total.p50, p99_ms=total.p99)


@dataclass(eq=False, slots=True)
class Step:
    statuses: Counter[tuple[str, Blame]] = field(default_factory=Counter)
    queue: Sketch = field(default_factory=Sketch)
    total: Sketch = field(default_factory=Sketch)
    slot_ms: float = 0.0

    def merge(self, other: Step) -> None:
        self.statuses.update(other.statuses)
        self.queue.merge(other.queue)
        self.total.merge(other.total)
        self.slot_ms += other.slot_ms

    def stats(self, number: int | None) -> StepStats:
        statuses: Counter[str] = Counter()
        blames: Counter[str] = Counter()
        for (status, blame), count in self.statuses.items():
            statuses[status] += count
            blames[blame] += count
        calls = blames.total()
        rates = rate(blames["model"], calls), rate(blames["infra"], calls)
        times = self.queue.quantiles(), self.total.quantiles()
        return StepStats(number, calls, dict(statuses), dict(blames), *rates, *times, round(self.slot_ms / 1000, 3))


@dataclass(eq=False, slots=True)
class Run:
    """One training run; its steps in the order of their first call."""

    blames: Counter[Blame] = field(default_factory=Counter)
    steps: OrderedDict[int | None, Step] = field(default_factory=OrderedDict)
    last_step: int | None = None
    seen_at: float = 0.0

    def note(self, result: Result, number: int | None, now: float) -> Step:
        """Count the result, and return its step, which has its times."""
        self.blames[result.blame] += 1
        self.last_step, self.seen_at = number, now
        if number not in self.steps:
            self.steps[number] = Step()
            if len(self.steps) > STEPS_KEPT:
                self.steps.popitem(last=False)
        step = self.steps[number]
        step.statuses[result.status, result.blame] += 1
        step.slot_ms += result.timings.start_ms + result.timings.run_ms
        return step

    def merge(self, other: Run) -> None:
        self.blames.update(other.blames)
        for number, step in other.steps.items():
            self.steps.setdefault(number, Step()).merge(step)
        if other.seen_at > self.seen_at:
            self.last_step, self.seen_at = other.last_step, other.seen_at


class LiveStats:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: deque[Second] = deque(maxlen=SECONDS_KEPT + 1)
        self._failures: dict[bool, deque[tuple[float, Failure]]] = {ours: deque(maxlen=FAILURES_KEPT) for ours in (True, False)}
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()

    @classmethod
    def merged(cls, parts: Sequence[LiveStats]) -> LiveStats:
        """Of several processes of one machine, whose monotonic clocks are the same."""
        whole, seconds = cls(), dict[int, Second]()
        whole._since = min((part._since for part in parts), default=whole._since)
        for part in parts:
            for second in part._seconds:
                seconds.setdefault(second.at, Second(second.at)).merge(second)
            for key, run in part._runs.items():
                whole._runs.setdefault(key, Run()).merge(run)
        whole._seconds.extend(seconds[at] for at in sorted(seconds))
        for ours, failures in whole._failures.items():
            failures.extend(sorted((one for part in parts for one in part._failures[ours]), key=lambda one: one[0]))
        newest = sorted(whole._runs, key=lambda key: whole._runs[key].seen_at)[-RUNS_KEPT:]
        whole._runs = OrderedDict((key, whole._runs[key]) for key in newest)
        return whole

    def part(self, run: tuple[str, str] | None = None) -> LiveStats:
        """What another process needs: of this run its steps, or all but the steps."""
        part = LiveStats(self._clock)
        part._since = self._since
        if run is not None:
            part._runs.update({run: self._runs[run]} if run in self._runs else {})
            return part
        part._seconds, part._failures = self._seconds, self._failures
        for key, one in self._runs.items():
            part._runs[key] = Run(one.blames, OrderedDict(), one.last_step, one.seen_at)
        return part

    def note(self, result: Result, tenant: str, tags: Tags, *, answered: bool = True) -> None:
        now, timings, seconds = self._clock(), result.timings, self._seconds
        if not seconds or seconds[-1].at != int(now):
            seconds.append(Second(int(now)))
        second = seconds[-1]
        second.blames[result.blame] += 1
        if not answered:
            return
        stages = second.stages
        times = [(stages["queue"], timings.queue_ms), (stages["total"], timings.total_ms)]
        if timings.run_ms:  # it ran
            times += (stages["start"], timings.start_ms), (stages["run"], timings.run_ms)
        if tenant in second.calls or len(second.calls) < TENANTS_KEPT:
            second.calls[tenant] += 1
            second.slot_ms[tenant] = second.slot_ms.get(tenant, 0.0) + timings.start_ms + timings.run_ms
        if result.blame in ("infra", "model"):
            self._failures[result.blame == "infra"].append((now, _failure(result, tenant, tags)))
        if tags.run:
            key = (tenant, tags.run)
            run = self._runs.get(key) or self._runs.setdefault(key, Run())
            self._runs.move_to_end(key)
            if len(self._runs) > RUNS_KEPT:
                self._runs.popitem(last=False)
            step = run.note(result, tags.step, now)
            times += (step.queue, timings.queue_ms), (step.total, timings.total_ms)
        for sketch, ms in times:
            sketch.counts[round(_PER_OCTAVE * log2(ms)) if ms > 0.001 else -80] += 1
            if ms > sketch.most:
                sketch.most = ms

    @property
    def uptime_s(self) -> float:
        return round(self._clock() - self._since, 1)

    @property
    def window_s(self) -> float:
        """Shorter just after the start, so that rates are not too small."""
        return min(float(WINDOW_S), max(1.0, self.uptime_s))

    def _recent(self) -> Iterable[Second]:
        begin = self._clock() - self.window_s
        return [second for second in self._seconds if second.at + 1 > begin]

    def calls_per_s(self) -> float:
        return round(sum(second.blames.total() for second in self._recent()) / self.window_s, 2)

    def latency_ms(self) -> dict[str, Quantiles]:
        merged = {stage: Sketch() for stage in STAGES}
        for second in self._recent():
            for stage, sketch in second.stages.items():
                merged[stage].merge(sketch)
        return {stage: sketch.quantiles() for stage, sketch in merged.items()}

    def seconds(self) -> list[SecondStats]:
        """Complete seconds only: the current one would look like a drop."""
        known = {second.at: second.stats() for second in self._seconds}
        now = int(self._clock())
        return [known.get(at, EMPTY_SECOND) for at in range(now - SECONDS_KEPT, now)]

    def tenants(self, only: str | None = None) -> list[TenantShare]:
        calls: Counter[str] = Counter()
        slot_ms: defaultdict[str, float] = defaultdict(float)
        for second in self._recent():
            calls.update(second.calls)
            for tenant, ms in second.slot_ms.items():
                slot_ms[tenant] += ms
        all_ms = sum(slot_ms.values())
        wanted = [(tenant, ms) for tenant, ms in slot_ms.items() if only is None or tenant == only]
        shares = [TenantShare(tenant, calls[tenant], round(ms / 1000, 3), rate(ms, all_ms)) for tenant, ms in wanted]
        return sorted(shares, key=lambda share: -share.slot_s)

    def failures(self, only: str | None = None) -> list[Failure]:
        now = self._clock()
        newest_first = sorted([*self._failures[True], *self._failures[False]], key=lambda entry: -entry[0])
        return [
            msgspec.structs.replace(failure, seconds_ago=round(now - at, 1))
            for at, failure in newest_first
            if only is None or failure.tenant == only
        ]

    def runs(self, only: str | None = None) -> list[RunSummary]:
        now, found = self._clock(), []
        for (tenant, name), run in reversed(self._runs.items()):
            if only is None or tenant == only:
                calls = run.blames.total()
                rates = rate(run.blames["model"], calls), rate(run.blames["infra"], calls)
                found.append(RunSummary(name, tenant, calls, *rates, run.last_step, round(now - run.seen_at, 1)))
        return found

    def run(self, name: str, tenant: str) -> RunStats:
        run = self._runs.get((tenant, name))
        if run is None:
            return RunStats(name, tenant)
        return RunStats(name, tenant, run.blames.total(), [step.stats(number) for number, step in run.steps.items()])


def rate(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _failure(result: Result, tenant: str, tags: Tags) -> Failure:
    return Failure(
        status=result.status,
        blame=result.blame,
        error=result.error[:200],
        exit_code=result.exit_code,
        signal=result.signal,
        total_ms=result.timings.total_ms,
        run=tags.run,
        step=tags.step,
        tenant=tenant,
        worker=result.worker,
        request_id=result.request_id,
    )
