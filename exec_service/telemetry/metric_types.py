"""Counters and histograms that are cheap to write; their samples are assembled when Prometheus scrapes.

prometheus_client's own take a lock for each write, and its histogram walks the buckets: 0.8 and 1.1 µs, eleven times per call.
Here only one event loop writes, so a dictionary is enough: all metrics of a call take 14 µs instead of 24.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from exec_service.telemetry.logs import dropped_lines
from exec_wire.supervisor import Supervisor

Labels = tuple[str, ...]
M = TypeVar("M", CounterMetricFamily, GaugeMetricFamily)
OTHER = "other"
NONE = "none"  # for a call that names none: Prometheus treats an empty label as missing


def labelled(family: M, values: Mapping[str, float]) -> M:
    """The family, which has one label, with its values by that label."""
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def process_metrics(supervisor: Supervisor) -> Iterator[CounterMetricFamily]:
    help = "Unexpected failures of long-lived tasks of this process, each of which was restarted"
    yield labelled(CounterMetricFamily("exec_task_failures", help, labels=["task"]), supervisor.failures)
    help = "Log lines that were dropped because standard error was not read fast enough"
    yield CounterMetricFamily("exec_log_lines_dropped", help, dropped_lines())


class BoundedLabels:
    """Label values that callers choose. At most `most` names are labels at a time; the others are `other`.

    A name is replaced only after `idle_s` without use. Otherwise many names in turn would replace each other, and every
    replacement creates new series.
    """

    def __init__(
        self, most: int, idle_s: float, forget: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle_s, self._forget, self._clock = most, idle_s, forget, clock
        self._seen: OrderedDict[str, float] = OrderedDict()  # least recently used first

    def label(self, name: str) -> str:
        if not name:
            return NONE
        if name not in self._seen and not self._make_room():
            return OTHER
        self._seen[name] = self._clock()
        self._seen.move_to_end(name)
        return name

    def _make_room(self) -> bool:
        if len(self._seen) < self._most:
            return True
        oldest, seen_at = next(iter(self._seen.items()))
        if self._clock() - seen_at < self._idle_s:
            return False
        del self._seen[oldest]
        self._forget(oldest)
        return True


class _Counts(dict[Labels, float]):
    def __init__(self, rest: Collection[Labels]) -> None:
        super().__init__()
        self._rest = rest

    def __missing__(self, values: Labels) -> float:
        for rest in self._rest:
            self.setdefault((values[0], *rest), 0.0)
        return self.setdefault(values, 0.0)


class FastCounter(Collector):
    """A counter: `counter.counts[labels] += 1`. `rest`: the known values of the labels after the first. A new value of the
    first label starts all of these at 0: `rate()` misses the first increment of a series that appears with it.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str], rest: Collection[Labels] = ()) -> None:
        self._name, self._help, self._labels = name, help, labels
        self.counts = _Counts(rest)

    def begin(self, *values: str) -> None:
        self.counts.setdefault(values, 0.0)

    def forget(self, first: str) -> None:
        """Remove every series whose first label has this value."""
        for values in [values for values in self.counts if values[0] == first]:
            del self.counts[values]

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        yield family


class FastHistogram(Collector):
    """A histogram of seconds with one label. A row has the count of each bucket, not cumulative, the count beyond the bounds,
    and the sum."""

    def __init__(self, name: str, help: str, label: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._label, self._bounds = name, help, label, bounds
        self.rows: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (len(bounds) + 2))

    def forget(self, value: str) -> None:
        self.rows.pop(value, None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=[self._label])
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for value, (*counts, seconds) in self.rows.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric([value], buckets=buckets, sum_value=seconds)
        yield family
