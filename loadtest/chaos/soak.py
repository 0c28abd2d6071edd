"""Half an hour at 80 % load while faults are injected: `make soak` (MINUTES=2 to try it). Needs root.

The cluster with sandboxes of `loadtest.chaos`. First its capacity is measured, then a load of 80 % of it starts: single calls
at even intervals, each followed until it has its one right result. Faults are injected and undone or repaired, one after the
other, with calm in between. The speed of a shared machine changes, so in calm the load is adjusted until the cores are 80 %
busy. At the end the cluster is measured in turns with a fresh one, which shows whether it became slower by itself.

Latency counts from when a call was due. The soak is good if nothing is lost, wrong or answered twice; if the p99 of calm calls
stays within twice that of the first minutes; if the memory of the processes that live through all of it is flat; and if at the
end the cluster is as fast as a fresh one and uses at most 2 % of the cores at rest.
"""

import itertools
import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean, median
from typing import NamedTuple, Self

from loadtest.chaos.cluster import Cluster
from loadtest.chaos.faults import SOAKED
from loadtest.support import meter, redis_server, results
from loadtest.support.processes import exit_on_sigterm
from loadtest.support.results import EXIT_FAILED, percentile
from loadtest.support.steady_load import Counts, SteadyLoad, add_up

MODULE = "loadtest.chaos.soak"
LOAD = 0.8
CALLERS = 64  # calls that may be open; when all are, the load falls behind, which counts as latency
CAPACITY_CALLERS = 24
SETTLE_S = 2.0  # after a fault, when the load has caught up
CAUGHT_UP_S = 0.1
PATIENCE_S, MOST_PATIENCE_S = 30.0, 120.0  # for catching up: until the load is lowered, until calm begins anyway
FIRST_S = 300.0
STEP_S, MEMORY_STEPS = 1.0, 5
PACE_GAIN, PACE_STEP = 0.3, (0.9, 1.05)  # how fast the load is adjusted, and the limits of one adjustment
BUSY_WITHIN = 0.05
FRESH_TURNS, FRESH_LEAST = 3, 0.9
REST_S, REST_MOST = 5.0, 0.02
CALM_LEAST = 100  # calm calls that a p99 needs; with fewer it is that of all calls
P99_MOST = 2.0
GROWTH_MOST, GROWTH_MOST_BYTES = 0.10, 10_000_000


class Rest(NamedTuple):
    """Shares of the cores that were busy without load."""

    cluster: float  # by the cluster's processes, also those that outlived their parent
    machine: float  # by everything on the machine, and by its host


class Injected(NamedTuple):
    fault: str
    at_s: float
    calm_after_s: float


class Memory(NamedTuple):
    """Resident bytes of the gateway and the worker that are never killed, and of Redis."""

    gateway: int
    worker: int
    redis: int


class Pace(NamedTuple):
    """Calls sent per second, and how busy the cores were in the second before."""

    per_s: float
    busy: float
    calm: bool


class Soak(NamedTuple):
    about: dict[str, str]
    minutes: float
    capacity_per_s: float
    busy: float  # of the cores in calm, on average
    beside_fresh: float  # capacity at the end / that of a fresh cluster
    rest: Rest
    counts: Counts
    first_s: float
    first_p99_ms: float
    later_p99_ms: float
    last_p99_ms: float
    growth: dict[str, tuple[float, int]]  # of the memory, as a share and in bytes
    injected: list[Injected]
    paces: list[Pace]
    worker_misses: list[str]

    def misses(self) -> list[str]:
        """The criteria that were not met."""
        worst, rest = max(self.later_p99_ms, self.last_p99_ms), self.rest.cluster
        checks = {
            f"the promise: {self.counts}": self.counts.holds and not self.counts.given_up,
            f"the p99: {worst:.0f} ms after {self.first_p99_ms:.0f} ms at first": worst <= P99_MOST * self.first_p99_ms,
            f"the load: cores {100 * self.busy:.0f} % busy": abs(self.busy - LOAD) <= BUSY_WITHIN,
            f"its speed: {self.beside_fresh:.2f} of a fresh cluster's": self.beside_fresh >= FRESH_LEAST,
            f"rest: cores {100 * rest:.1f} % busy afterwards": rest <= REST_MOST,
        }
        for name, (share, grown) in self.growth.items():
            flat = share <= GROWTH_MOST or grown <= GROWTH_MOST_BYTES
            checks[f"the memory of the {name}, grown by {100 * share:.0f} % ({grown / 1e6:.0f} MB)"] = flat
        return [*self.worker_misses, *(words for words, met in checks.items() if not met)]


class Watch:
    """A thread that records memory, and adjusts the load while it is calm."""

    def __init__(self, cluster: Cluster, load: SteadyLoad) -> None:
        self.memory: list[Memory] = []
        self.paces: list[Pace] = []
        self.calm = True
        self._cluster, self._load = cluster, load
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._work_done = self._thread.submit(self._work)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._work_done.result(10)

    def _work(self) -> None:
        for step in itertools.count(1):
            busy_s, began = meter.machine_busy_s(), time.monotonic()
            if self._stop.wait(STEP_S):
                return
            self._adjust(meter.others_share(busy_s, 0.0, time.monotonic() - began))
            if step % MEMORY_STEPS == 0:
                pids = (self._cluster.gateways[-1].pid, self._cluster.workers[-1].pid, self._cluster.redis.pid)
                self.memory.append(Memory(*(meter.memory_bytes(pid, "VmRSS") for pid in pids)))

    def _adjust(self, busy: float) -> None:
        assert self._load.per_s is not None
        if self.calm and (busy > LOAD or self._load.behind_s <= CAUGHT_UP_S):  # idle cores of a stuck cluster do not count
            self._load.per_s = next_pace(self._load.per_s, busy)
        self.paces.append(Pace(self._load.per_s, busy, self.calm))


def next_pace(per_s: float, busy: float) -> float:
    """A step towards the rate at which the cores are as busy as wanted."""
    least, most = PACE_STEP
    return per_s * min(most, max(least, 1 + PACE_GAIN * (LOAD - busy) / LOAD))


class Capacity:
    """Measures calls/s at saturation, and counts these calls too."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []

    def measure(self, cluster: Cluster, seconds: float) -> float:
        load = SteadyLoad(lambda: cluster.urls, cluster.program, 1, name="capacity", callers=CAPACITY_CALLERS, batch=1)
        self.counts.append(load.counts)
        with load:
            time.sleep(seconds / 3)
            before, began = load.counts.right, time.monotonic()
            time.sleep(seconds)
            return (load.counts.right - before) / (time.monotonic() - began)

    def beside_fresh(self, cluster: Cluster, seconds: float, seed: int) -> float:
        with Cluster(sandbox=True, seed=seed) as fresh:
            turns = [(self.measure(cluster, seconds), self.measure(fresh, seconds)) for _ in range(FRESH_TURNS)]
        say("calls/s at the end, and of a fresh cluster: " + ", ".join(f"{old:.0f} and {new:.0f}" for old, new in turns))
        return median(old / new for old, new in turns)


def soak(minutes: float, seed: int, about: dict[str, str]) -> Soak:
    calm_s = 30.0 if minutes >= 10 else 6.0
    capacity = Capacity()
    with meter.own_processes("soak") as own_s, Cluster(sandbox=True, seed=seed) as cluster:
        say(f"measuring the capacity for {2 * calm_s / 3:.0f} s")
        most = capacity.measure(cluster, calm_s / 2)
        load = SteadyLoad(lambda: cluster.urls, cluster.program, seed, name="soak", callers=CALLERS, batch=1, per_s=LOAD * most)
        say(f"{most:.0f} calls/s; {minutes:g} minutes, starting with {LOAD * most:.0f}")
        began = time.monotonic()
        with load, Watch(cluster, load) as watch:
            injected = inject(cluster, load, watch, began, began + 60 * minutes, calm_s)
        misses = cluster.probe_workers()
        rest = look_at_rest(own_s)
        say(f"at rest {100 * rest.cluster:.1f} % of the cores, the machine {100 * rest.machine:.1f} %")
        beside_fresh = capacity.beside_fresh(cluster, calm_s / 3, seed)
    visits = visits_of([due - began for due in load.dues], load.latencies_s, injected)
    first_s, end_s = min(FIRST_S, 60 * minutes / 4), 60 * minutes
    return Soak(
        about,
        minutes,
        most,
        fmean(pace.busy for pace in watch.paces if pace.calm),
        beside_fresh,
        rest,
        add_up([load.counts, *capacity.counts]),
        first_s,
        calm_p99([visit for visit in visits if visit.at_s < first_s]),
        calm_p99([visit for visit in visits if visit.at_s >= first_s]),
        calm_p99([visit for visit in visits if visit.at_s >= end_s - first_s]),
        growth_of(watch.memory),
        injected,
        watch.paces,
        misses,
    )


def look_at_rest(own_s: Callable[[], float]) -> Rest:
    """Without this process, which has the load and the proxy."""
    time.sleep(REST_S)
    began, busy_s = time.monotonic(), meter.machine_busy_s()
    used_s = own_s() - time.process_time()
    time.sleep(REST_S)
    used_s = own_s() - time.process_time() - used_s
    wall_s = time.monotonic() - began
    return Rest(used_s / wall_s / (os.cpu_count() or 1), meter.others_share(busy_s, 0.0, wall_s))


def inject(cluster: Cluster, load: SteadyLoad, watch: Watch, began: float, until: float, calm_s: float) -> list[Injected]:
    """Faults, one after the other, with calm in between."""
    made: list[Injected] = []
    pause(2 * calm_s, until)
    for name, fault in itertools.cycle(SOAKED.items()):
        if time.monotonic() + calm_s > until:
            break
        at, watch.calm = time.monotonic(), False
        fault(cluster)
        cluster.wait_until_healthy()
        cluster.replace_removed()
        wait_caught_up(load)
        watch.calm = True
        made.append(Injected(name, at - began, time.monotonic() - at))
        words = f"calm after {made[-1].calm_after_s:.1f} s; {load.counts.right} right so far, {load.per_s:.0f} calls/s"
        say(f"{at - began:5.0f} s: {name}; {words}")
        pause(calm_s, until)
    pause(until - time.monotonic(), until)
    return made


def pause(seconds: float, until: float) -> None:
    time.sleep(max(0.0, min(seconds, until - time.monotonic())))


def wait_caught_up(load: SteadyLoad) -> None:
    """Lower a load that does not catch up after a repair: the machine has become slower."""
    assert load.per_s is not None
    began = time.monotonic()
    while load.behind_s > CAUGHT_UP_S and time.monotonic() < began + MOST_PATIENCE_S:
        time.sleep(STEP_S / 10)
        if time.monotonic() > began + PATIENCE_S:
            load.per_s *= PACE_STEP[0] ** 0.1
    time.sleep(SETTLE_S)


class Visit(NamedTuple):
    at_s: float
    latency_ms: float
    calm: bool


def calm_p99(visits: list[Visit]) -> float:
    calm = [visit.latency_ms for visit in visits if visit.calm]
    chosen = calm if len(calm) >= CALM_LEAST else [visit.latency_ms for visit in visits]
    return percentile(chosen, 0.99) if chosen else 0.0


def visits_of(dues_s: list[float], latencies_s: list[float], injected: list[Injected]) -> list[Visit]:
    """A call is calm if it was due and answered outside of every fault and its aftermath."""
    starts = [one.at_s for one in injected]

    def calm(due_s: float, end_s: float) -> bool:
        index = bisect_right(starts, end_s) - 1  # the last fault that began before the answer
        return index < 0 or due_s > starts[index] + injected[index].calm_after_s

    visits = zip(dues_s, latencies_s, strict=True)
    return [Visit(due_s, 1000 * latency_s, calm(due_s, due_s + latency_s)) for due_s, latency_s in visits]


def growth_of(memory: list[Memory]) -> dict[str, tuple[float, int]]:
    """From a third of the time on: before that, results that are kept for two minutes fill the memory."""
    third = max(1, len(memory) // 6)
    early, late = memory[len(memory) // 3 :][:third], memory[-third:]
    found = {}
    for name in Memory._fields:
        before, after = (median(getattr(one, name) for one in some) if some else 0 for some in (early, late))
        found[name] = (after / before - 1 if before else 0.0, int(after - before))
    return found


def page(found: Soak) -> str:
    missed, counts = found.misses(), found.counts
    paces = [pace.per_s for pace in found.paces if pace.calm] or [0.0]
    memory = ", ".join(f"{name} {100 * share:+.1f} %" for name, (share, _) in found.growth.items())
    rows = [[f"{one.at_s / 60:.1f}", one.fault, f"{one.calm_after_s:.1f} s"] for one in found.injected]
    return f"""# Soak

{found.minutes:g} minutes at {100 * LOAD:.0f} % load: two gateways, three workers with sandboxes, Redis and the load on one
machine, {len(found.injected)} faults. {f"**Missed**: {'; '.join(missed)}." if missed else "All criteria met."}

The capacity was {found.capacity_per_s:.0f} calls/s at first. In calm the load was adjusted between {min(paces):.0f} and
{max(paces):.0f} calls/s, {fmean(paces):.0f} on average, with the cores {100 * found.busy:.0f} % busy. At the end the cluster
had {found.beside_fresh:.2f} of the capacity of a fresh one, measured in turns, and at rest it kept the cores
{100 * found.rest.cluster:.1f} % busy (the whole machine: {100 * found.rest.machine:.1f} %).

{counts.right:,} right results; lost {counts.lost}, wrong {counts.wrong}, answered twice {counts.twice}, blamed on the model \
{counts.model}, given up {counts.given_up}; {counts.sent_again} sent again, {counts.broken} of them after a broken connection.
p99 of calm calls: {found.first_p99_ms:.0f} ms in the first {found.first_s / 60:.1f} minutes, {found.later_p99_ms:.0f} ms
afterwards, {found.last_p99_ms:.0f} ms at the end (at most {P99_MOST:g} x). Memory of the processes that lived through it,
from the first third to the end: {memory}.

{results.markdown(["minute", "fault", "calm after"], rows)}

{results.about_table(found.about)}
"""


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.epilog = redis_server.CHOICE
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    found = soak(given.minutes, given.seed, results.about(MODULE, argv, server=redis_server.version()))
    results.write_page(page(found), given.page)
    return EXIT_FAILED if found.misses() else 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
