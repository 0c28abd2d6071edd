"""How many cores, workers and gateways a training run needs: `python -m loadtest.plan --help`.

    python -m loadtest.calibrate                                                once, on a machine like those that will serve
    python -m loadtest.plan --calls-per-step 45000 --mean-latency 0.3 --mix rollout

"45,000 calls" has two meanings, and they are far apart. Per step: so many calls in each training step, in bursts, as the turns
of the rollouts end; between the bursts nothing comes. In flight: so many calls at every moment; whoever has an answer asks at
once for the next. For the second, Little's law alone says how many calls/s that is: calls in flight / mean latency. The plan
answers for both, and says what the first fleet does when all calls of a step come at the same moment.

The answers come from a simulation (`loadtest.simulate`) with costs that `calibrate` has measured; how well it predicts this
machine is in docs/results/performance.md. What it assumes: cores like the calibrated ones, machines of their own for Redis,
gateways and callers, a network that is not in the way.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from msgspec import Struct

from loadtest.calibrate import DEFAULT_JSON, Calibration, read
from loadtest.results import percentile
from loadtest.simulate import Cost, Demand, Shape, Simulation, Visit, closed_loop, open_loop, turn_s
from loadtest.workload import MIXES, calls

EXIT_USAGE = 2
THREAD_MOST = 0.6  # of a core, of what has only one thread: gateways and Redis
SIMULATED_MOST = 50_000  # calls in one simulation; a larger system is cut into equal cells, of which one is simulated
IN_FLIGHT_SIMULATED_MOST = 18_000
FEWEST_WORKERS = 2  # of one, nothing is left when its machine dies
IN_FLIGHT_ROUNDS = 6  # how often every place in flight is filled again, of which the first two do not count


class Ask(Struct, frozen=True):
    calls_per_step: int
    mean_latency_s: float
    mix: str
    step_s: float
    bursts: int
    burst_s: float
    cores_per_node: int
    seed: int = 1


class Fleet(Struct, frozen=True):
    """Of all clusters together; each has one Redis."""

    clusters: int
    workers: int
    gateways: int
    cores: int  # of the workers


class Latency(Struct, frozen=True):
    mean_s: float
    p50_s: float
    p99_s: float
    most_s: float


class Traffic(Struct, frozen=True):
    """Of the busiest Redis, when the load is highest."""

    commands_per_s: float
    megabytes_per_s: float
    core_share: float


class Death(Struct, frozen=True):
    """A worker's machine dies in the middle of the busiest time."""

    started_again: int  # calls
    latency: Latency
    of_these_p99_s: float  # of the calls that were started again


class Answer(Struct, frozen=True):
    meaning: str
    calls_per_s: float  # when the load is highest
    parts: int  # of which one was simulated
    fleet: Fleet
    latency: Latency
    busy_share: float  # of the workers' cores, over the time that was simulated
    traffic: Traffic
    death: Death


class Plan(Struct, frozen=True):
    ask: Ask
    calibration: dict[str, str]
    cpu_ms_per_call: dict[str, float]
    per_step: Answer
    at_once: Latency  # the fleet of `per_step`, and every call of a step at the same moment
    at_once_done_s: float
    in_flight: Answer


def latency_of(visits: Sequence[Visit]) -> Latency:
    all_s = [visit.latency_s for visit in visits]
    figures = (fmean(all_s), percentile(all_s, 0.5), percentile(all_s, 0.99), max(all_s))
    return Latency(*(round(one, 4) for one in figures))


class Case(NamedTuple):
    """A meaning, ready to be simulated: one of `parts` equal parts of the whole, which is too large."""

    words: str
    parts: int
    clusters: int
    per_s: float  # of one part, when the load is highest
    busy_s: float  # for so long
    death_s: float
    simulate: Callable[[int, float | None], Simulation]  # workers, and when one dies
    counts: Callable[[list[Visit]], list[Visit]]  # of all calls those that are typical


class Planner:
    def __init__(self, calibration: Calibration, ask: Ask) -> None:
        self._calibration, self._ask = calibration, ask
        self._costs = msgspec.structs.replace(calibration.costs, caller=Cost())
        self._demands = calibration.demands(calls(min(ask.calls_per_step, 4000), ask.seed, ask.mix), ask.seed)
        self._mean_work_s = fmean(demand.cpu_s for demand in self._demands)

    def plan(self) -> Plan:
        per_step = self._per_step()
        at_once = self._run_at_once(per_step)
        return Plan(
            self._ask,
            {name: getattr(self._calibration, name) for name in ("started", "commit", "command")},
            {"program and sandbox": round(1000 * self._mean_work_s, 3), **self._lonely_ms()},
            per_step,
            latency_of(at_once.visits),
            round(at_once.took_s, 2),
            self._in_flight(),
        )

    def _lonely_ms(self) -> dict[str, float]:
        parts = {"worker": self._costs.worker, "gateway": self._costs.gateway, "redis": self._costs.redis}
        return {name: round(1000 * (2 * cost.wake_s + cost.call_s), 3) for name, cost in parts.items()}

    def _draw(self, count: int) -> list[Demand]:
        chance = random.Random(self._ask.seed)
        return [chance.choice(self._demands) for _ in range(count)]

    # -- how many of what -----------------------------------------------------------------------------------------------------

    def _clusters(self, per_s: float) -> int:
        """Each has one Redis, which has one thread."""
        return max(1, math.ceil(per_s * self._costs.redis.call_s / THREAD_MOST))

    def _gateways(self, per_s: float) -> int:
        return max(1, math.ceil(per_s * self._costs.gateway.call_s / THREAD_MOST))

    def _shape(self, workers: int, per_s: float) -> Shape:
        cores, found = self._ask.cores_per_node, self._calibration
        slots = round(cores * found.slots / found.cores)
        return Shape(workers, slots, cores, self._gateways(per_s), turn_s=turn_s(cores))

    def _fewest(self, average: float, case: Case) -> int:
        """The smallest number of workers with the wanted latency: doubled until it is good, then halved back."""

        def good(workers: int) -> bool:
            visits = case.counts(case.simulate(workers, None).visits)
            return fmean(visit.latency_s for visit in visits) <= self._ask.mean_latency_s

        tried = max(FEWEST_WORKERS, math.floor(average))
        bad = tried - 1
        while not good(tried):
            bad, tried = tried, max(tried + 1, tried * 5 // 4)
            if tried > 100 * average + 100:
                raise ValueError(f"{self._ask.mean_latency_s:g} s cannot be reached: a call alone takes longer")
        while tried - bad > 1:
            middle = (bad + tried) // 2
            if good(middle):
                tried = middle
            else:
                bad = middle
        return tried

    def _answer(self, case: Case, workers: int) -> Answer:
        found, hurt = case.simulate(workers, None), case.simulate(workers, case.death_s)
        again = [visit for visit in hurt.visits if visit.starts > 1]
        cores = workers * self._ask.cores_per_node
        redis, each = self._calibration.redis_per_call, case.parts / case.clusters
        return Answer(
            case.words,
            round(case.per_s * case.parts, 1),
            case.parts,
            Fleet(case.clusters, workers * case.parts, self._gateways(case.per_s * case.parts), cores * case.parts),
            latency_of(case.counts(found.visits)),
            round(sum(machine.busy_s for machine in found.worker_cores) / (cores * found.took_s), 3),
            Traffic(
                round(each * case.per_s * redis["commands"], 1),
                round(each * case.per_s * (redis["in_bytes"] + redis["out_bytes"]) / 1e6, 3),
                round(min(1.0, each * found.redis_cores.busy_s / min(case.busy_s, found.took_s)), 3),
            ),
            Death(
                len(again),
                latency_of(case.counts(hurt.visits)),
                round(percentile([visit.latency_s for visit in again], 0.99), 3) if again else 0.0,
            ),
        )

    # -- the first meaning ----------------------------------------------------------------------------------------------------

    def _arrivals(self, count: int) -> list[tuple[float, Demand]]:
        """One step: bursts at even distances, within each calls at times of chance."""
        ask, chance = self._ask, random.Random(self._ask.seed)
        every_s = ask.step_s / ask.bursts
        times = sorted(every_s * (n % ask.bursts) + chance.uniform(0, ask.burst_s) for n in range(count))
        return list(zip(times, self._draw(count), strict=True))

    def _per_step(self) -> Answer:
        ask = self._ask
        peak_per_s = ask.calls_per_step / ask.bursts / ask.burst_s
        clusters = self._clusters(peak_per_s)
        parts = max(clusters, math.ceil(ask.calls_per_step / SIMULATED_MOST))
        arrivals = self._arrivals(max(1, ask.calls_per_step // parts))
        per_s = peak_per_s / parts

        def simulate(workers: int, death_s: float | None) -> Simulation:
            return open_loop(self._shape(workers, per_s), self._costs, arrivals, death_s)

        words = f"{ask.calls_per_step:,} calls in a step of {ask.step_s:g} s, in {ask.bursts} bursts of {ask.burst_s:g} s"
        death_s = ask.step_s / ask.bursts * (ask.bursts // 2) + ask.burst_s / 2
        case = Case(words, parts, clusters, per_s, ask.bursts * ask.burst_s, death_s, simulate, lambda visits: visits)
        average = ask.calls_per_step / parts / ask.step_s * self._mean_work_s / ask.cores_per_node
        return self._answer(case, self._fewest(average, case))

    def _run_at_once(self, answer: Answer) -> Simulation:
        fleet, parts = answer.fleet, answer.parts
        shape = self._shape(fleet.workers // parts, 0.0)
        shape = msgspec.structs.replace(shape, gateways=max(1, fleet.gateways // parts))
        count = max(1, self._ask.calls_per_step // parts)
        return open_loop(shape, self._costs, [(0.0, demand) for demand in self._draw(count)])

    # -- the second -----------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> Answer:
        ask = self._ask
        whole_per_s = ask.calls_per_step / ask.mean_latency_s  # Little
        clusters = self._clusters(whole_per_s)
        parts = max(clusters, math.ceil(ask.calls_per_step * IN_FLIGHT_ROUNDS / IN_FLIGHT_SIMULATED_MOST))
        in_flight, per_s = max(1, ask.calls_per_step // parts), whole_per_s / parts
        demands = self._draw(in_flight * IN_FLIGHT_ROUNDS)

        def simulate(workers: int, death_s: float | None) -> Simulation:
            return closed_loop(self._shape(workers, per_s), self._costs, demands, in_flight, death_s)

        words = f"{ask.calls_per_step:,} calls in flight at every moment"
        death_s = ask.mean_latency_s * IN_FLIGHT_ROUNDS / 2
        case = Case(words, parts, clusters, per_s, math.inf, death_s, simulate, _settled)
        return self._answer(case, self._fewest(per_s * self._mean_work_s / ask.cores_per_node, case))


def _settled(visits: list[Visit]) -> list[Visit]:
    """Without the beginning and the end of a closed loop, where all come, or few are left."""
    return visits[len(visits) // 3 : -len(visits) // 6]


# -- words --------------------------------------------------------------------------------------------------------------------


def page(plan: Plan) -> str:
    ask, once = plan.ask, plan.at_once
    costs = ", ".join(f"{name} {value:.2f}" for name, value in plan.cpu_ms_per_call.items())
    lines = [
        f'"{ask.calls_per_step:,} calls" can mean two things. Mean latency wanted: {ask.mean_latency_s:g} s; mix {ask.mix}.',
        f"CPU ms of a lonely call: {costs}. Machines of {ask.cores_per_node} cores.",
        "",
        "1. PER STEP",
        *_lines(plan.per_step),
        f"   all at once  on the same fleet: done after {plan.at_once_done_s:.1f} s, {_times(once)}",
        "",
        "2. IN FLIGHT",
        *_lines(plan.in_flight),
        f"   Little's law: {ask.calls_per_step:,} in flight / {ask.mean_latency_s:g} s = "
        f"{ask.calls_per_step / ask.mean_latency_s:,.0f} calls/s. If that is not what you meant, it is the first.",
        "",
        f"Costs: `{plan.calibration['command']}`, {plan.calibration['started']}, commit {plan.calibration['commit']}.",
    ]
    return "\n".join(lines)


def _times(latency: Latency) -> str:
    return f"mean {latency.mean_s:.3f} s, p50 {latency.p50_s:.3f} s, p99 {latency.p99_s:.3f} s, most {latency.most_s:.3f} s"


def _lines(answer: Answer) -> list[str]:
    fleet, traffic, death = answer.fleet, answer.traffic, answer.death
    clusters = f"; {fleet.clusters} clusters, since one Redis has one thread" if fleet.clusters > 1 else ""
    return [
        f"   load         {answer.meaning}; at most {answer.calls_per_s:,.0f} calls/s",
        f"   fleet        {fleet.cores:,} cores, {fleet.workers:,} workers, {fleet.gateways:,} gateways{clusters}",
        f"   latency      {_times(answer.latency)}; the workers' cores are busy {100 * answer.busy_share:.0f} % of the time",
        f"   Redis        each {traffic.commands_per_s:,.0f} commands/s, {traffic.megabytes_per_s:.1f} MB/s, "
        f"{100 * traffic.core_share:.0f} % of its core",
        f"   a node dies  {death.started_again} calls are started again (p99 {death.of_these_p99_s:.1f} s), none is lost; "
        f"all: {_times(death.latency)}",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls-per-step", type=int, default=45_000, metavar="N")
    parser.add_argument("--mean-latency", type=float, default=0.3, metavar="S", help="of a call, that is wanted (default 0.3)")
    parser.add_argument("--mix", choices=MIXES, default="rollout")
    parser.add_argument(
        "--step-seconds", type=float, default=60.0, metavar="S", help="in which a step's calls come (default 60)"
    )
    parser.add_argument("--bursts", type=int, default=6, help="in which they come, one for each turn (default 6)")
    parser.add_argument("--burst-seconds", type=float, default=5.0, metavar="S", help="that a burst takes (default 5)")
    parser.add_argument("--cores-per-node", type=int, default=16, metavar="N", help="of a worker's machine (default 16)")
    parser.add_argument("--calibration", type=Path, default=DEFAULT_JSON, metavar="PATH", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    given = parser.parse_args(argv)
    if words := wrong(given):
        print(f"python -m loadtest.plan: {words}", file=sys.stderr)
        return EXIT_USAGE
    ask = Ask(
        given.calls_per_step,
        given.mean_latency,
        given.mix,
        given.step_seconds,
        given.bursts,
        given.burst_seconds,
        given.cores_per_node,
    )
    try:
        plan = Planner(read(given.calibration), ask).plan()
    except (ValueError, msgspec.DecodeError) as error:
        print(f"python -m loadtest.plan: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(msgspec.json.format(msgspec.json.encode(plan)).decode() if given.json else page(plan))
    return 0


def wrong(given: argparse.Namespace) -> str:
    names = ("calls_per_step", "mean_latency", "step_seconds", "bursts", "burst_seconds", "cores_per_node")
    for name in names:
        if getattr(given, name) <= 0:
            return f"--{name.replace('_', '-')} must be more than 0"
    if given.burst_seconds > given.step_seconds / given.bursts:
        return "--burst-seconds is longer than the time from one burst to the next, --step-seconds / --bursts"
    if not given.calibration.is_file():
        return f"there is no {given.calibration}: run `python -m loadtest.calibrate` on a machine like those that will serve"
    return ""


if __name__ == "__main__":
    sys.exit(main())
