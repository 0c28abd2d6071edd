"""Half an hour at 80 % of what the machine can do, while things die: `make soak` (MINUTES=2 to try it). Needs root.

The sandboxed cluster of `loadtest.chaos`: two gateways, three workers, one Redis. First its capacity is measured, then a load
of 80 % of it begins: single calls at even distances, whatever became of the others, each followed until it has its one right
result. Again and again a fault is injected, undone or repaired, and when the load has caught up there is calm for a while.
A machine among others is faster in one minute and slower in the next, so in calm the load follows it: 80 % is where its cores
are 80 % busy. What could hide behind that, a cluster that becomes slower by itself, is looked for at the end, when it and a
fresh one are measured in turns.
Latency counts from when a call was due. Good is: nothing lost, wrong or answered twice; the p99 of calls in calm, after the
first minutes, at most twice that of the first minutes; the memory of the processes that live through all of it flat; the
cluster still as fast as a fresh one, and quiet when nobody asks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from bisect import bisect_right
from pathlib import Path
from statistics import fmean, median

import msgspec
from msgspec import Struct

from loadtest import chaos, facts, meter, redis_server
from loadtest.chaos import Cluster, Trouble
from loadtest.parts import end_in_order
from loadtest.results import percentile
from loadtest.steady_load import Books, SteadyLoad, together

ROOT = Path(__file__).parents[1]
DEFAULT_JSON = ROOT / "docs" / "results" / "soak.json"
LOAD = 0.8
CALLERS = 64  # calls that may be open at a time; with all of them open the load falls behind, and that counts as latency
CAPACITY_CALLERS = 24
SETTLE_S = 2.0  # after a fault, when the load has caught up
CAUGHT_UP_S = 0.1
PATIENCE_S, MOST_PATIENCE_S = 30.0, 120.0  # while it does not catch up: until it is lowered, until calm begins anyway
FIRST_S = 300.0
STEP_S, SAMPLE_STEPS = 1.0, 5
PACE_GAIN, PACE_STEP = 0.3, (0.9, 1.05)  # how fast the load follows the machine, and its least and most in one step
BUSY_WITHIN = 0.05
FRESH_TURNS, FRESH_LEAST = 3, 0.9
REST_S, REST_MOST, REST_SHOWN = 5.0, 0.02, 5
CALM_LEAST = 100  # calls in calm, to take a p99 of them; where there are fewer, of all calls
P99_MOST = 2.0
GROWTH_MOST, GROWTH_MOST_BYTES = 0.10, 10_000_000
FAULTS: dict[str, Trouble] = {
    "kill -9 a worker": chaos.worker_dies,
    "kill -9 every zygote": chaos.zygotes_die,
    "FLUSHALL, twice": chaos.server_forgets,
    "kill -9 a gateway": chaos.gateway_dies,
    "kill -9 every runner": chaos.runners_die,
    "a worker stands still for 8 s": chaos.worker_stands_still,
    "kill -9 every nsjail": chaos.jails_die,
    "Redis gone for 3 s, empty afterwards": chaos.server_restarts,
    "a gateway and a worker cut off for 8 s": chaos.half_is_cut_off,
}


class Rest(Struct, frozen=True):
    """Shares of the cores that were busy with nothing to do."""

    cluster: float  # by the cluster's processes, also those that outlived their parent
    machine: float  # by everything on the machine: other processes, the kernel's threads, what its host took from it
    threads: dict[str, float]  # the busiest ones of the cluster


class Ends(Struct, frozen=True):
    """What was measured before and after."""

    capacity_per_s: float
    beside_fresh: float
    rest: Rest
    misses: list[str]  # of the workers


class Fault(Struct, frozen=True):
    name: str
    at_s: float
    calm_again_s: float  # later


class Memory(Struct, frozen=True):
    """Resident bytes of the gateway and the worker that are never killed, and of Redis."""

    at_s: float
    gateway: int
    worker: int
    redis: int


class Pace(Struct, frozen=True):
    """How many calls a second are sent, and how busy the cores were in the second before."""

    at_s: float
    per_s: float
    busy: float
    calm: bool


class Window(Struct, frozen=True):
    at_s: float
    calls: int
    calm_calls: int
    p50_ms: float  # of calm calls
    p99_ms: float
    all_p99_ms: float


class Soak(Struct):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    server: str
    minutes: float
    capacity_per_s: float
    per_s: float  # sent in calm, on average
    busy: float  # of the cores in calm, on average
    beside_fresh: float  # its capacity at the end, by that of a fresh cluster
    at_rest: float  # how busy the cluster keeps the cores when the load is over
    books: Books
    first_minutes: float  # what the rest is compared with
    first_p99_ms: float
    rest_p99_ms: float
    last_p99_ms: float
    growth: dict[str, float]  # of the memory, as a share, from its first third to its end
    grown_bytes: dict[str, int]
    faults: list[Fault] = []
    windows: list[Window] = []
    memory: list[Memory] = []
    paces: list[Pace] = []  # of every fifth second
    machine_at_rest: float = 0.0
    threads_at_rest: dict[str, float] = {}
    worker_misses: list[str] = []

    def misses(self) -> list[str]:
        """What is not as it should be, in words."""
        worst = max(self.rest_p99_ms, self.last_p99_ms)
        checks = {
            f"the promise: {self.books}": self.books.holds and not self.books.given_up,
            f"the p99: {worst:.0f} ms after {self.first_p99_ms:.0f} ms at first": worst <= P99_MOST * self.first_p99_ms,
            f"the load: cores {100 * self.busy:.0f} % busy": abs(self.busy - LOAD) <= BUSY_WITHIN,
            f"its speed: {self.beside_fresh:.2f} of a fresh cluster's": self.beside_fresh >= FRESH_LEAST,
            f"rest: cores {100 * self.at_rest:.1f} % busy afterwards ({self.busiest()})": self.at_rest <= REST_MOST,
        }
        for name, share in self.growth.items():
            grown = self.grown_bytes[name]
            flat = share <= GROWTH_MOST or grown <= GROWTH_MOST_BYTES
            checks[f"the memory of the {name}, grown by {100 * share:.0f} % ({grown / 1e6:.0f} MB)"] = flat
        return [*self.worker_misses, *(words for words, met in checks.items() if not met)]

    def busiest(self) -> str:
        """The threads that were busy at rest."""
        return (
            ", ".join(f"{name}: {100 * share:.1f} %" for name, share in self.threads_at_rest.items()) or "no thread stands out"
        )


def resident_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # Redis, which is just being started again
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024 if "VmRSS:" in text else 0


class Busy:
    """How busy the cores were since the last look."""

    def __init__(self) -> None:
        self._used_s, self._at = meter.machine_busy_s(), time.monotonic()

    def share(self) -> float:
        before_s, before = self._used_s, self._at
        self._used_s, self._at = meter.machine_busy_s(), time.monotonic()
        return (self._used_s - before_s) / (self._at - before) / (os.cpu_count() or 1)


class Watch:
    """In a thread of its own: looks at the memory, and has the load follow the machine while it is calm."""

    def __init__(self, cluster: Cluster, load: SteadyLoad, began: float) -> None:
        self.memory: list[Memory] = []
        self.paces: list[Pace] = []
        self.calm = True
        self._cluster, self._load, self._began = cluster, load, began
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._failure is not None:
            raise RuntimeError("nobody looked at memory and load any more") from self._failure

    def _work(self) -> None:
        try:
            self._look_until_stopped()
        except BaseException as error:
            self._failure = error

    def _look_until_stopped(self) -> None:
        busy = Busy()
        for step in itertools.count(1):
            if self._stop.wait(STEP_S):
                return
            self._follow(busy.share())
            if step % SAMPLE_STEPS == 0:
                pids = (self._cluster.gateways[-1].pid, self._cluster.workers[-1].pid, self._cluster.redis.pid)
                self.memory.append(Memory(self._at_s(), *map(resident_bytes, pids)))

    def _follow(self, busy: float) -> None:
        assert self._load.per_s is not None
        if self.calm and (busy > LOAD or self._load.behind_s <= CAUGHT_UP_S):  # not because everything stands still
            self._load.per_s = next_pace(self._load.per_s, busy)
        self.paces.append(Pace(self._at_s(), round(self._load.per_s, 1), round(busy, 3), self.calm))

    def _at_s(self) -> float:
        return round(time.monotonic() - self._began, 1)


def next_pace(per_s: float, busy: float) -> float:
    """A little nearer to where the cores are as busy as they should be."""
    least, most = PACE_STEP
    return per_s * min(most, max(least, 1 + PACE_GAIN * (LOAD - busy) / LOAD))


class Capacity:
    """Calls a second, as fast as they are answered. Keeps books of them too."""

    def __init__(self) -> None:
        self.books: list[Books] = []

    def measure(self, cluster: Cluster, seconds: float) -> float:
        load = SteadyLoad(lambda: cluster.urls, cluster.program, 1, name="capacity", callers=CAPACITY_CALLERS, batch=1)
        self.books.append(load.books)
        with load:
            time.sleep(seconds / 3)
            before, began = load.books.right, time.monotonic()
            time.sleep(seconds)
            return (load.books.right - before) / (time.monotonic() - began)

    def beside_fresh(self, cluster: Cluster, seconds: float, seed: int) -> float:
        with Cluster(sandbox=True, seed=seed) as fresh:
            turns = [(self.measure(cluster, seconds), self.measure(fresh, seconds)) for _ in range(FRESH_TURNS)]
        say("calls/s at the end, and of a fresh cluster: " + ", ".join(f"{old:.0f} and {new:.0f}" for old, new in turns))
        return median(old / new for old, new in turns)


def soak(minutes: float, seed: int, command: str) -> Soak:
    calm_s = 30.0 if minutes >= 10 else 6.0
    capacity = Capacity()
    with meter.OwnProcesses("soak") as own, Cluster(sandbox=True, seed=seed) as cluster:
        say(f"two gateways, three workers; measuring what they can do for {2 * calm_s / 3:.0f} s")
        most = capacity.measure(cluster, calm_s / 2)
        load = SteadyLoad(lambda: cluster.urls, cluster.program, seed, name="soak", callers=CALLERS, batch=1, per_s=LOAD * most)
        say(f"{most:.0f} calls/s; {minutes:g} minutes, beginning with {LOAD * most:.0f}")
        began = time.monotonic()
        with load, Watch(cluster, load, began) as watch:
            faults = inject(cluster, load, watch, began, began + 60 * minutes, calm_s)
        misses = chaos.look_at_workers(cluster)
        at_rest = look_at_rest(own)
        say(f"at rest {100 * at_rest.cluster:.1f} % of the cores, the machine {100 * at_rest.machine:.1f} %: {at_rest.threads}")
        beside_fresh = capacity.beside_fresh(cluster, calm_s / 3, seed)
    books = together([load.books, *capacity.books])
    return assemble(load, books, faults, watch, began, minutes, Ends(most, beside_fresh, at_rest, misses), command)


def look_at_rest(own: meter.OwnProcesses) -> Rest:
    """Without this process, which has the load and the proxy."""
    time.sleep(REST_S)
    began, busy, threads = time.monotonic(), Busy(), own.threads()
    used_s = own.used_s() - time.process_time()
    time.sleep(REST_S)
    used_s = own.used_s() - time.process_time() - used_s
    cores_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    shares = {key: (run_s - threads.get(key, 0.0)) / cores_s for key, run_s in own.threads().items() if key[0] != os.getpid()}
    busiest = sorted(shares, key=lambda key: -shares[key])[:REST_SHOWN]
    return Rest(used_s / cores_s, busy.share(), {meter.thread_name(*key): round(shares[key], 4) for key in busiest})


def inject(cluster: Cluster, load: SteadyLoad, watch: Watch, began: float, until: float, calm_s: float) -> list[Fault]:
    """Faults, one after the other, with calm in between."""
    made: list[Fault] = []
    rest(2 * calm_s, until)
    for name, trouble in itertools.cycle(FAULTS.items()):
        if time.monotonic() + calm_s > until:
            break
        at, watch.calm = time.monotonic(), False
        trouble(cluster)
        chaos.wait_until_well(cluster.urls)
        chaos.replace(cluster)
        wait_caught_up(load)
        watch.calm = True
        made.append(Fault(name, round(at - began, 1), round(time.monotonic() - at, 1)))
        words = f"{name}; calm after {made[-1].calm_again_s:.1f} s; {load.books.right} right so far, {load.per_s:.0f} calls/s"
        say(f"{at - began:5.0f} s: {words}")
        rest(calm_s, until)
    rest(until - time.monotonic(), until)
    return made


def rest(seconds: float, until: float) -> None:
    time.sleep(max(0.0, min(seconds, until - time.monotonic())))


def wait_caught_up(load: SteadyLoad) -> None:
    """A load that does not catch up with everything repaired is too much for what the machine can do by now. It is lowered."""
    assert load.per_s is not None
    began = time.monotonic()
    while load.behind_s > CAUGHT_UP_S and time.monotonic() < began + MOST_PATIENCE_S:
        time.sleep(STEP_S / 10)
        if time.monotonic() > began + PATIENCE_S:
            load.per_s *= PACE_STEP[0] ** 0.1
    time.sleep(SETTLE_S)


# -- figures ------------------------------------------------------------------------------------------------------------------


class Visit(Struct, frozen=True):
    at_s: float
    latency_ms: float
    calm: bool


def assemble(
    load: SteadyLoad,
    books: Books,
    faults: list[Fault],
    watch: Watch,
    began: float,
    minutes: float,
    ends: Ends,
    command: str,
) -> Soak:
    visits = visits_of([due - began for due in load.dues], load.latencies_s, faults)
    first_s = min(FIRST_S, 60 * minutes / 4)
    end_s = 60 * minutes
    paces = [pace for pace in watch.paces if pace.calm]
    growth, grown = growth_of(watch.memory)
    return Soak(
        facts.now(),
        facts.commit(),
        command,
        facts.machine(),
        redis_server.version(),
        minutes,
        round(ends.capacity_per_s, 1),
        round(sum(visit.calm for visit in visits) / (STEP_S * len(paces)), 1),
        round(fmean(pace.busy for pace in paces), 3),
        round(ends.beside_fresh, 3),
        round(ends.rest.cluster, 4),
        books,
        round(first_s / 60, 2),
        calm_p99([visit for visit in visits if visit.at_s < first_s]),
        calm_p99([visit for visit in visits if visit.at_s >= first_s]),
        calm_p99([visit for visit in visits if visit.at_s >= end_s - first_s]),
        growth,
        grown,
        faults,
        windows_of(visits, end_s / 30),
        watch.memory,
        watch.paces[::SAMPLE_STEPS],
        round(ends.rest.machine, 4),
        ends.rest.threads,
        ends.misses,
    )


def p99(values: list[float]) -> float:
    return round(percentile(values, 0.99), 1) if values else 0.0


def calm_p99(visits: list[Visit]) -> float:
    calm = [visit.latency_ms for visit in visits if visit.calm]
    return p99(calm if len(calm) >= CALM_LEAST else [visit.latency_ms for visit in visits])


def visits_of(dues_s: list[float], latencies_s: list[float], faults: list[Fault]) -> list[Visit]:
    """In calm is a call that was due, and answered, outside of every fault and its aftermath."""
    starts = [fault.at_s for fault in faults]

    def calm(due_s: float, end_s: float) -> bool:
        index = bisect_right(starts, end_s) - 1  # the last fault that had begun when it was answered
        return index < 0 or due_s > starts[index] + faults[index].calm_again_s

    return [
        Visit(round(due_s, 2), round(1000 * latency_s, 2), calm(due_s, due_s + latency_s))
        for due_s, latency_s in zip(dues_s, latencies_s, strict=True)
    ]


def windows_of(visits: list[Visit], width_s: float) -> list[Window]:
    by_window: dict[int, list[Visit]] = {}
    for visit in visits:
        by_window.setdefault(int(visit.at_s / width_s), []).append(visit)
    made = []
    for number, some in sorted(by_window.items()):
        calm = [visit.latency_ms for visit in some if visit.calm]
        if calm:
            middle = round(percentile(calm, 0.5), 1)
            everything = p99([visit.latency_ms for visit in some])
            made.append(Window(round(number * width_s, 1), len(some), len(calm), middle, p99(calm), everything))
    return made


def growth_of(memory: list[Memory]) -> tuple[dict[str, float], dict[str, int]]:
    """From a third of the time on: before that, records of results that are kept for two minutes fill up."""
    third = max(1, len(memory) // 6)
    early, late = memory[len(memory) // 3 :][:third], memory[-third:]
    shares, grown = {}, {}
    for name in ("gateway", "worker", "redis"):
        before, after = (median(getattr(one, name) for one in some) if some else 0 for some in (early, late))
        shares[name] = round(after / before - 1, 4) if before else 0.0
        grown[name] = int(after - before)
    return shares, grown


# -- words --------------------------------------------------------------------------------------------------------------------


def words(found: Soak) -> str:
    missed = found.misses()
    verdict = f"**Missed**: {'; '.join(missed)}." if missed else "All good."
    books = found.books
    memory = ", ".join(f"{name} {100 * share:+.1f} %" for name, share in found.growth.items())
    low, high = (pick([pace.per_s for pace in found.paces if pace.calm], default=0.0) for pick in (min, max))
    rows = "\n".join(f"| {fault.at_s / 60:.1f} | {fault.name} | {fault.calm_again_s:.1f} s |" for fault in found.faults)
    return f"""## Soak

{found.minutes:g} minutes at {100 * LOAD:.0f} % load, two gateways, three workers with sandboxes, Redis and the load on one
machine, {len(found.faults)} faults. {verdict}

The cluster could do {found.capacity_per_s:.0f} calls/s at first. The load began with {100 * LOAD:.0f} % of that and, in calm,
followed the machine, whose speed changes: {low:.0f} to {high:.0f} calls/s, {found.per_s:.0f} on average, the cores
{100 * found.busy:.0f} % busy. At the end the cluster had {found.beside_fresh:.2f} of the capacity of a fresh one, measured in
turns, and with nothing to do it kept the cores {100 * found.at_rest:.1f} % busy (the whole machine: \
{100 * found.machine_at_rest:.1f} %).

{books.right:,} right results; lost {books.lost}, wrong {books.wrong}, answered twice {books.twice}, blamed on the model \
{books.model}, given up {books.given_up}; {books.sent_again} were sent again, {books.broken} of them after a broken connection.
p99 of calls in calm: {found.first_p99_ms:.0f} ms in the first {found.first_minutes:g} minutes, {found.rest_p99_ms:.0f} ms
afterwards, {found.last_p99_ms:.0f} ms at the end (at most {P99_MOST:g} x). Memory of the processes that lived through it,
from its first third to its end: {memory}.

| minute | fault | calm again after |
| ---: | --- | ---: |
{rows}

![Latency and memory over time](soak.png)

`{found.command}` · {found.started} · commit {found.commit} · {found.machine["cpu"]}, {found.machine["cores"]} cores
"""


def say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="soak",
        description=__doc__,
        epilog=redis_server.CHOICE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", default=DEFAULT_JSON, help="where to write (default: %(default)s)")
    given = parser.parse_args(argv)
    found = soak(given.minutes, given.seed, f"python -m loadtest.soak --minutes {given.minutes:g} --seed {given.seed}")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(words(found))
    say("python -m loadtest.performance --render puts this into docs/results/performance.md")
    return 1 if found.misses() else 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
