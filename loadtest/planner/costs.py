"""What a call costs on this machine, for the planner: `python -m loadtest.calibrate --help`.

A Redis, a gateway and a worker, a process each, and the load from a process of its own. First large batches to a worker that
runs nothing: what a call costs on the path when many share a request. Then some hundred programs of the workload in real
sandboxes, one at a time with pauses (what a call costs on an idle machine), and with every slot busy and more waiting (what
the cores gain by warm caches or lose to each other, and the capacity). Two numbers are fitted, so that the simulation has the
latency of a lonely call and the calls/s of the last part; what lies between is a prediction, and `--validate` compares it with
open-loop runs at 30, 50, 70 and 90 % of the capacity, none of which it has seen. They run the same programs at random moments,
in other orders and companies: what is tested is waiting and sharing, not what other programs would cost.

A machine among others is faster in one minute and slower in the next. So lonely and crowded calls are measured in turns, and
all programs are timed with every slot busy before each run of the validation too, which are short, many, and in turns: the load
is a share of the capacity at that moment, and the calibration is concluded with all that was measured between the runs. The
prediction is made for the machine's speed around each call: what its host took from it, and what the CPU time of the other
calls' programs tells, beside that of the same programs during the calibration. A second one (`blind`) is made for the speed
before the run alone.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, median

import msgspec
from msgspec import Struct

from loadtest import facts, meter, path, redis_server
from loadtest.open_loop import Landed, Order, Report, drive, latencies_s, poisson
from loadtest.parts import Part, end_in_order
from loadtest.programs import TEMPLATES
from loadtest.redis_server import RedisServer
from loadtest.results import percentile
from loadtest.simulate import Cost, Costs, Demand, Shape, closed_loop, open_loop, turn_s
from loadtest.workload import Program, calls, deal
from worker.config import default_slots, usable_cores

ROOT = Path(__file__).parents[1]
DEFAULT_JSON = ROOT / "docs" / "results" / "performance" / "calibration.json"
PROGRAMS, ALONE_PAUSE_S, CROWD = 250, 0.03, 2  # the last: calls in flight for each slot, so that all are busy
KEPT = 8  # samples of each program's cost
BATCHED = path.Shape(calls=20_000, batch=500, connections=8, code_bytes=300)
COALESCED_CALLS, COALESCED_IN_FLIGHT = 3000, 300  # of our client, which puts calls that wait into one request
LOADS = (0.3, 0.5, 0.7, 0.9)
VALIDATE_S = 8.0  # of each run
MOMENT_S, FEWEST_AROUND = 1.0, 5  # for which the machine has one speed, if so many calls tell it
WITHIN = 0.2
DRAWS = 3  # simulations of each run: a program does not cost the same each time
BUSY_SHARE = 0.05  # of the machine, used by others: more than that spoils a calibration
STARTING_LOAD_S = 0.8  # CPU time that the interpreter which makes the load takes to start
SEED = 11

Say = Callable[[str], None]


class Effort(Struct, frozen=True):
    rounds: int = 6  # in which everything is measured in turns
    share: int = 1  # 5: a fifth of the calls of the path alone


FULL, QUICK = Effort(), Effort(rounds=2, share=5)


class Samples(Struct, frozen=True):
    """What a program cost each time on a busy machine, set-up and cleaning included."""

    kind: str
    cpu_ms: list[float]
    pause_ms: float  # neither computing nor waiting for a core
    own_ms: float = 0.0  # the program's part of the CPU time with every slot busy, by the kernel's count


class Point(Struct, frozen=True):
    """Open-loop runs at one load beside their predictions, in milliseconds, the median of the runs."""

    load: float  # share of the capacity
    calls: int
    per_s: float
    measured_mean_ms: float
    predicted_mean_ms: float
    measured_p50_ms: float
    predicted_p50_ms: float
    measured_p99_ms: float
    predicted_p99_ms: float
    others_share: float
    means_ms: list[float]  # measured, of each run by itself
    speeds: list[float]  # of the machine during each run, by that during the calibration
    cpu_ms: dict[str, float] = {}  # per call, by process
    run_errors: list[float] = []  # of the mean, run by run
    blind_mean_ms: float = 0.0  # predicted with the machine's speed before each run alone
    blind_p99_ms: float = 0.0

    @property
    def errors(self) -> tuple[float, float]:
        """Of the mean and the p99, as shares of what was measured."""
        return (self.predicted_mean_ms / self.measured_mean_ms - 1, self.predicted_p99_ms / self.measured_p99_ms - 1)

    @property
    def good(self) -> bool:
        typical = median(self.run_errors) if self.run_errors else 0.0
        return all(abs(error) <= WITHIN for error in (*self.errors, typical))


class Calibration(Struct):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    server: str
    mix: str  # of the saturated part
    cores: int
    slots: int
    calls: int
    capacity_per_s: float  # calls/s with every slot busy, the load on the same cores
    cpu_ms: dict[str, float]  # per call with every slot busy, by process
    batched_cpu_ms: dict[str, float]  # per call of the path alone, in large batches
    cold: dict[str, float]  # by process: CPU time of a call on an idle machine, by that on a busy one
    unseen: float  # fitted: by what the costs are larger than what was counted
    costs: Costs
    redis_per_call: dict[str, float]  # commands, in_bytes, out_bytes
    others_share: float  # of the machine, used by processes that are not ours
    stolen: float = 0.0  # of the CPU time that was wanted with every slot busy, what the host gave to others
    programs: dict[str, Samples] = {}
    validation: list[Point] = []

    def demands(self, programs: Iterable[Program], seed: int = SEED) -> list[Demand]:
        chance, alike = random.Random(seed), self._alike()

        def demand(program: Program) -> Demand:
            samples = self.programs.get(_key(program.kind, program.name)) or chance.choice(_known(program, alike))
            return Demand(chance.choice(samples.cpu_ms) / 1000, samples.pause_ms / 1000)

        return [demand(program) for program in programs]

    def _alike(self) -> dict[str, list[Samples]]:
        """By kind, and by kind and template: for programs that were not calibrated."""
        found: dict[str, list[Samples]] = {}
        for key, samples in self.programs.items():
            for name in (samples.kind, _template(key)):
                found.setdefault(name, []).append(samples)
        return found

    def speeds_during(self, report: Report) -> list[float]:
        """Of the machine around each call, by that during the calibration.

        What programs took of CPU time tells it, of the run as a whole, and around each call those of the others; besides, what
        the machine's host took from it.
        """
        due_s, now = [one.due_s for one in report.landed], [one.cpu_ms for one in report.landed]
        then = [self.programs[_key(one.kind, one.name)].own_ms for one in report.landed]
        sums = [(0.0, 0.0), *zip(accumulate(then), accumulate(now), strict=True)]
        around, stolen = list[float](), list[float]()
        for index, at_s in enumerate(due_s):
            since_s, until_s = at_s - MOMENT_S / 2, at_s + MOMENT_S / 2
            first, last = bisect_left(due_s, since_s), bisect_right(due_s, until_s)
            expected, took = (sums[last][k] - sums[first][k] - (then, now)[k][index] for k in (0, 1))
            around.append(expected / took if last - first > FEWEST_AROUND and took > 0 else sums[-1][0] / sums[-1][1])
            stolen.append(min(0.9, report.stolen_share(since_s, until_s)))
        level = sum(own / speed for own, speed in zip(then, around, strict=True)) / sums[-1][1]
        return [level * speed * (1 - share) / (1 - self.stolen) for speed, share in zip(around, stolen, strict=True)]

    @property
    def here(self) -> Shape:
        """This machine, the load on it too."""
        return Shape(slots=self.slots, cores=self.cores, together=True, turn_s=turn_s(self.cores))


def _key(kind: str, name: str) -> str:
    return f"{kind}/{name}"


def _template(key: str) -> str:
    return key.partition("#")[0]


def _known(program: Program, alike: dict[str, list[Samples]]) -> list[Samples]:
    found = alike.get(_key(program.kind, program.name)) or alike.get(program.kind)
    if found is None:
        raise ValueError(
            f"no {program.kind} program was calibrated: run `python -m loadtest.calibrate` with a mix that has some"
        )
    return found


# -- measuring ----------------------------------------------------------------------------------------------------------------


class Measured(Struct, frozen=True):
    """A load, with the CPU time of each process meanwhile."""

    report: Report
    cpu_s: dict[str, float]
    redis: dict[str, float]
    others_share: float


class Here:
    """A cluster on this machine, and what its processes use."""

    def __init__(self, redis: RedisServer, gateway: Part, worker: Part, slots: int) -> None:
        self.url, self.slots = gateway.url, slots
        self._redis, self._gateway, self._worker = redis, gateway, worker
        self._idle_cpu, self._idle_traffic = dict[str, float](), dict[str, float]()  # per second

    def look_idle(self, seconds: float = 3.0) -> None:
        """What heartbeats cost: it is no call's share."""
        cpu, traffic = self.used_s(), self._traffic()
        time.sleep(seconds)
        self._idle_cpu = {name: (value - cpu[name]) / seconds for name, value in self.used_s().items()}
        self._idle_traffic = {name: (value - traffic[name]) / seconds for name, value in self._traffic().items()}

    def used_s(self) -> dict[str, float]:
        sandboxes = [pid for pid in meter.tree(self._worker.pid) if pid != self._worker.pid]
        return {
            "gateway": meter.cpu_s(self._gateway.pid),
            "redis": meter.cpu_s(self._redis.pid),
            "worker": meter.cpu_s(self._worker.pid),
            "sandbox": sum(map(meter.cpu_s, sandboxes)),
        }

    def _traffic(self) -> dict[str, float]:
        names = {
            "commands": "total_commands_processed",
            "in_bytes": "total_net_input_bytes",
            "out_bytes": "total_net_output_bytes",
        }
        return {name: self._redis.info(field) for name, field in names.items()}

    def measure(
        self, programs: list[Program], at_s: list[float] | None = None, in_flight: int = 1, pause_s: float = 0.0
    ) -> Measured:
        before, traffic, busy = self.used_s(), self._traffic(), meter.machine_busy_s()
        began, own = time.perf_counter(), time.process_time()
        report = drive(Order(self.url, programs, at_s or [], in_flight, pause_s, apart=True))
        _check(report)
        time.sleep(0.1)  # what is reaped and cleaned up now belongs to the calls
        elapsed_s, after = time.perf_counter() - began, self.used_s()
        used = {name: after[name] - before[name] for name in before} | {"caller": report.cpu_s}
        for_calls = {name: value - elapsed_s * self._idle_cpu.get(name, 0.0) for name, value in used.items()}
        ours_s = sum(used.values()) + time.process_time() - own + STARTING_LOAD_S
        others = meter.others_share(busy, ours_s, elapsed_s)
        redis = {
            name: value - traffic[name] - elapsed_s * self._idle_traffic.get(name, 0.0)
            for name, value in self._traffic().items()
        }
        return Measured(report, for_calls, redis, round(others, 3))

    @property
    def full(self) -> int:
        """Calls in flight that keep every slot busy."""
        return CROWD * self.slots

    def crowd(self, programs: list[Program], chance: random.Random) -> Measured:
        """All of them, with every slot busy and more waiting."""
        return self.measure(chance.sample(programs, len(programs)), in_flight=self.full)


def _check(report: Report) -> None:
    """A refusal is quick, and would pass for speed. (An endless program on a busy machine is right.)"""
    failed = Counter(one.status for one in report.landed if one.blame == "infra" and one.status != "timeout")
    if failed:
        raise RuntimeError(f"calls failed by no fault of theirs, so nothing can be learned from this: {dict(failed)}")


@contextlib.contextmanager
def cluster() -> Iterator[Here]:
    slots = default_slots()
    with (
        RedisServer() as redis,
        Part.gateway(redis.url) as gateway,
        Part.worker(redis.url, slots=slots, min_tier="D") as worker,
    ):
        gateway.wait_for_workers(1)
        here = Here(redis, gateway, worker, slots)
        here.measure(calls(60, SEED + 1, "rollout"), in_flight=here.full)  # connections, code that runs the first time
        here.look_idle()
        yield here


def population(mix: str) -> list[Program]:
    """The programs of a calibration, each with a name of its own."""
    some = calls(PROGRAMS, SEED, mix)
    return [msgspec.structs.replace(program, name=f"{program.name}#{number}") for number, program in enumerate(some)]


class Gathered(Struct, frozen=True):
    """What a calibration is made of."""

    batched_ms: dict[str, float]
    endless: Measured
    lonely: list[Measured]
    crowded: list[Measured]


def gather(here: Here, programs: list[Program], batched_ms: dict[str, float], effort: Effort, say: Say) -> Gathered:
    say("programs that never end")
    found, chance = Gathered(batched_ms, here.measure(_endless()), [], []), random.Random(SEED)
    say(f"{effort.rounds} rounds: a part of {len(programs)} programs one at a time, then all of them with every slot busy")
    for part in deal(programs, effort.rounds, SEED):
        found.lonely.append(here.measure(part, pause_s=ALONE_PAUSE_S))
        found.crowded.append(here.crowd(programs, chance))
    return found


def conclude(found: Gathered, mix: str, slots: int, command: str) -> Calibration:
    alone, loaded = together(found.lonely), together(found.crowded)
    made = assemble(mix, slots, found.batched_ms, alone, found.endless, loaded, command)
    made.stolen = round(fmean(crowd.report.stolen_share() for crowd in found.crowded), 4)
    _fit_pace(made, loaded.report, CROWD * slots)
    _fit_latency(made, alone.report)
    return made


def together(turns: list[Measured]) -> Measured:
    landed = [one for turn in turns for one in turn.report.landed]
    report = Report(landed, sum(turn.report.wall_s for turn in turns), sum(turn.report.cpu_s for turn in turns))
    cpu_s, redis = _sum([turn.cpu_s for turn in turns]), _sum([turn.redis for turn in turns])
    return Measured(report, cpu_s, redis, max(turn.others_share for turn in turns))


def _sum(some: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in some) for name in some[0]}


def measure_batched(share: int) -> dict[str, float]:
    """CPU ms per call, by process, of the path alone when calls travel together."""
    with path.cluster(workers=1, slots=512) as (url, pids):
        shape = BATCHED._replace(calls=BATCHED.calls // share)
        bench = path.Bench(url, pids, shape)
        bench.turn(0)
        turn = bench.turn(1)
        some = [Program("std", f"call {n}", name="echo") for n in range(COALESCED_CALLS // share)]
        caller = drive(Order(url, some, in_flight=COALESCED_IN_FLIGHT))
    found = {"gateway": turn.cpu_us["gateway"], "redis": turn.cpu_us["redis"], "worker": turn.cpu_us["workers"]}
    return {name: value / 1000 for name, value in found.items()} | {"caller": 1000 * caller.cpu_s / len(caller.landed)}


def _endless() -> list[Program]:
    return [program for program in calls(50 * len(TEMPLATES["endless"]), SEED, "slow") if program.kind == "endless"]


# -- figures ------------------------------------------------------------------------------------------------------------------


def assemble(
    mix: str,
    slots: int,
    batched_ms: dict[str, float],
    alone: Measured,
    endless: Measured,
    loaded: Measured,
    command: str,
) -> Calibration:
    count = len(loaded.report.landed)
    cpu_ms = {name: 1000 * used / count for name, used in loaded.cpu_s.items()}
    trends = _trends(alone, loaded)
    made = Calibration(
        facts.now(),
        facts.commit(),
        command,
        facts.machine(),
        redis_server.version(),
        mix,
        usable_cores(),
        slots,
        count,
        round(loaded.report.calls_per_s, 2),
        {name: round(value, 4) for name, value in cpu_ms.items()},
        {name: round(value, 4) for name, value in batched_ms.items()},
        {name: round(trend.cold, 4) for name, trend in trends.items()},
        1.0,
        _costs({name: _cost(trends[name], batched_ms[name]) for name in PARTS}, trends["sandbox"].cold),
        {name: round(value / count, 2) for name, value in loaded.redis.items()},
        loaded.others_share,
    )
    made.programs = _programs(alone, endless, loaded, trends["sandbox"])
    return made


PARTS = ("caller", "gateway", "redis", "worker")


class Trend(Struct, frozen=True):
    """What a call costs one process, by how busy the machine is: a straight line, as measured with lonely and crowded calls."""

    lonely_ms: float
    crowded_ms: float
    lonely_use: float  # share of the cores
    crowded_use: float

    def at(self, use: float) -> float:
        steep = (self.crowded_ms - self.lonely_ms) / (self.crowded_use - self.lonely_use)
        return max(self.crowded_ms / 2, self.crowded_ms + steep * (use - self.crowded_use))

    @property
    def cold(self) -> float:
        return self.at(0.0) / self.at(1.0)


def _trends(alone: Measured, loaded: Measured) -> dict[str, Trend]:
    (lonely_ms, lonely_use), (crowded_ms, crowded_use) = map(_per_call, (alone, loaded))
    return {name: Trend(lonely_ms[name], crowded_ms[name], lonely_use, crowded_use) for name in lonely_ms}


def _per_call(measured: Measured) -> tuple[dict[str, float], float]:
    """CPU ms by process, and the share of the cores that was used."""
    report, used_s = measured.report, sum(measured.cpu_s.values())
    each_ms = {name: 1000 * value / len(report.landed) for name, value in measured.cpu_s.items()}
    return each_ms, used_s / (report.wall_s * usable_cores())


def _costs(parts: dict[str, Cost], program_cold: float) -> Costs:
    return Costs(parts["caller"], parts["gateway"], parts["redis"], parts["worker"], program_cold=program_cold)


def _cost(trend: Trend, batched_ms: float) -> Cost:
    """A lonely call wakes everybody twice, on its way in and out; of a large batch hardly anything is wake-ups."""
    busy_ms = trend.at(1.0)
    batched_ms = min(busy_ms, batched_ms)
    return Cost((busy_ms - batched_ms) / 2000, batched_ms / 1000, trend.cold)


def _programs(alone: Measured, endless: Measured, loaded: Measured, trend: Trend) -> dict[str, Samples]:
    pauses: dict[str, list[float]] = {}  # by template: a program by itself was alone but once
    for one in (*alone.report.landed, *endless.report.landed):
        pauses.setdefault(_template(_key(one.kind, one.name)), []).append(max(0.0, one.run_ms - one.cpu_ms))
    costs: dict[str, list[float]] = {}
    lonely, crowded = trend.lonely_ms / trend.at(1.0), trend.crowded_ms / trend.at(1.0)
    for measured, slower in ((loaded, crowded), (alone, lonely), (endless, lonely)):
        whole_ms = _whole_costs(measured)
        for one, cost_ms in zip(measured.report.landed, whole_ms, strict=True):
            costs.setdefault(_key(one.kind, one.name), []).append(round(cost_ms / slower, 3))
    own: dict[str, list[float]] = {}
    for one in loaded.report.landed:
        own.setdefault(_key(one.kind, one.name), []).append(one.cpu_ms)
    return {
        name: Samples(
            name.partition("/")[0],
            costs[name][:: -(-len(costs[name]) // KEPT)],
            round(median(pauses.get(_template(name), [0.0])), 3),
            round(fmean(own.get(name, [0.0])), 3),
        )
        for name in sorted(costs)
    }


def _whole_costs(measured: Measured) -> list[float]:
    """Of each program, with its part of what the sandbox spent around programs: forking, confining, reaping.

    That part goes by how long its start took, since both go by the size of the interpreter that is forked.
    """
    landed = measured.report.landed
    around_ms = 1000 * measured.cpu_s["sandbox"] - sum(one.cpu_ms for one in landed)
    starts_ms = sum(one.start_ms for one in landed) or 1.0
    return [one.cpu_ms + max(0.0, around_ms) * one.start_ms / starts_ms for one in landed]


def _again(made: Calibration, landed: list[Landed]) -> list[Demand]:
    return made.demands(Program(one.kind, "", name=one.name) for one in landed)


def _fit_pace(made: Calibration, report: Report, in_flight: int) -> None:
    """Until the simulation is as fast as the machine was, with the same programs.

    Several runs are simulated as one. What real ones lose at their beginnings and ends, 3 %, stands for what the simulation
    knows nothing of: cores that are idle for a moment while others have more to do than they can. Without it latency at 90 %
    load comes out a third too low.
    """
    for _ in range(3):
        found = closed_loop(made.here, apart(made.costs), _again(made, report.landed), in_flight)
        _scale(made, found.pace / report.calls_per_s)


def apart(costs: Costs) -> Costs:
    """Of calls that have a request each, as all have here: those that wait at the same time share next to nothing."""
    own = {name: getattr(costs, name) for name in PARTS}
    return msgspec.structs.replace(
        costs, **{name: Cost(0.0, 2 * one.wake_s + one.call_s, one.cold) for name, one in own.items()}
    )


def _times(costs: Costs, by: float) -> Costs:
    own = {name: getattr(costs, name) for name in PARTS}
    parts = {name: Cost(one.wake_s * by, one.call_s * by, one.cold) for name, one in own.items()}
    return msgspec.structs.replace(costs, hop_s=costs.hop_s * by, **parts)


def _scale(made: Calibration, by: float) -> None:
    made.unseen = round(made.unseen * by, 4)
    made.costs = _times(made.costs, by)
    made.programs = {
        name: msgspec.structs.replace(one, cpu_ms=[round(cost * by, 3) for cost in one.cpu_ms])
        for name, one in made.programs.items()
    }


def _fit_latency(made: Calibration, report: Report) -> None:
    """What a lonely call takes beyond everybody's CPU time, wake-ups and the network, or what of it no answer waits for."""
    demands, beyond_s = _again(made, report.landed), 0.0
    found_s, work_s = fmean(latencies_s(report.landed)), fmean(demand.cpu_s for demand in demands)
    for _ in range(4):
        visits = closed_loop(made.here, apart(made.costs), demands, 1, pause_s=ALONE_PAUSE_S).visits
        beyond_s += found_s - fmean(visit.latency_s for visit in visits)
        hop_s, aside = max(0.0, beyond_s), min(0.5, max(0.0, -beyond_s / work_s))
        made.costs = msgspec.structs.replace(made.costs, hop_s=hop_s, aside=aside)


# -- validation ---------------------------------------------------------------------------------------------------------------


class Turn(Struct, frozen=True):
    """One run with arrivals of chance, and with every slot busy just before it."""

    load: float
    programs: list[Program]
    at_s: list[float]
    before_per_s: float
    measured: Measured

    @property
    def measured_s(self) -> list[float]:
        return latencies_s(self.measured.report.landed)


class Predicted(Struct, frozen=True):
    """The same arrivals of the same programs, simulated."""

    told_s: list[float]
    blind_s: list[float]  # with the machine's speed before the run alone
    speed: float  # of the machine meanwhile, by that during the calibration


def take_turn(here: Here, programs: list[Program], load: float, seconds: float, seed: int, found: Gathered) -> Turn:
    chance = random.Random(seed)
    found.crowded.append(here.crowd(programs, chance))
    before_per_s = found.crowded[-1].report.calls_per_s
    chosen = chance.choices(programs, k=max(1, int(load * before_per_s * seconds)))
    at_s = poisson(load * before_per_s, len(chosen), seed)
    return Turn(load, chosen, at_s, before_per_s, here.measure(chosen, at_s))


def predict_turn(made: Calibration, turn: Turn) -> Predicted:
    speeds = made.speeds_during(turn.measured.report)
    before = [turn.before_per_s / made.capacity_per_s] * len(turn.programs)
    told_s, blind_s = (predict(made, turn.programs, turn.at_s, some) for some in (speeds, before))
    return Predicted(told_s, blind_s, fmean(speeds))


def point_of(turns: list[Turn], predicted: list[Predicted]) -> Point:
    """The median of the runs: a machine that stood still for a moment has spoiled one of them."""
    found = _medians([_figures(turn.measured_s) for turn in turns])
    told = _medians([_figures(one.told_s) for one in predicted])
    blind_mean_ms, _, blind_p99_ms = _medians([_figures(one.blind_s) for one in predicted])
    mean, p50, p99 = zip(found, told, strict=True)
    whole = together([turn.measured for turn in turns])
    count = len(whole.report.landed)
    return Point(
        turns[0].load,
        count,
        round(fmean(turn.load * turn.before_per_s for turn in turns), 2),
        *mean,
        *p50,
        *p99,
        whole.others_share,
        [round(1000 * fmean(turn.measured_s), 2) for turn in turns],
        [round(one.speed, 3) for one in predicted],
        {name: round(1000 * value / count, 3) for name, value in whole.cpu_s.items()},
        [round(fmean(one.told_s) / fmean(turn.measured_s) - 1, 3) for turn, one in zip(turns, predicted, strict=True)],
        blind_mean_ms,
        blind_p99_ms,
    )


def predict(made: Calibration, programs: list[Program], at_s: list[float], speeds: list[float]) -> list[float]:
    """Latencies on a machine that has such a speed when each call comes; gateway, Redis and the rest go by the average."""
    costs, found = _times(apart(made.costs), 1 / fmean(speeds)), list[float]()
    for draw in range(DRAWS):
        demands = [
            Demand(one.cpu_s / speed, one.pause_s) for one, speed in zip(made.demands(programs, draw), speeds, strict=True)
        ]
        found += [visit.latency_s for visit in open_loop(made.here, costs, zip(at_s, demands, strict=True)).visits]
    return found


def _figures(some_s: list[float]) -> tuple[float, float, float]:
    """Mean, p50 and p99 in milliseconds."""
    figures = (fmean(some_s), percentile(some_s, 0.5), percentile(some_s, 0.99))
    mean, p50, p99 = (round(1000 * one, 2) for one in figures)
    return mean, p50, p99


def _medians(rows: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    mean, p50, p99 = (round(median(column), 2) for column in zip(*rows, strict=True))
    return mean, p50, p99


def validation_table(points: list[Point]) -> str:
    head = ["load", "calls/s", "calls", "machine's speed", "mean measured", "low…high", "predicted", "", "run by run", "blind"]
    head += ["p50 measured", "predicted", "p99 measured", "predicted", "", "blind"]
    rows = [head, ["---:"] * len(head)]
    for one in points:
        mean, p99 = one.errors
        rows.append(
            [
                f"{100 * one.load:.0f} %",
                f"{one.per_s:.1f}",
                str(one.calls),
                f"{min(one.speeds):.2f}…{max(one.speeds):.2f}",
                f"{one.measured_mean_ms:.1f} ms",
                f"{min(one.means_ms):.1f}…{max(one.means_ms):.1f}",
                f"{one.predicted_mean_ms:.1f} ms",
                f"{100 * mean:+.0f} %",
                f"{100 * min(one.run_errors, default=mean):+.0f}…{100 * max(one.run_errors, default=mean):+.0f} %",
                f"{100 * (one.blind_mean_ms / one.measured_mean_ms - 1):+.0f} %",
                f"{one.measured_p50_ms:.1f} ms",
                f"{one.predicted_p50_ms:.1f} ms",
                f"{one.measured_p99_ms:.1f} ms",
                f"{one.predicted_p99_ms:.1f} ms",
                f"{100 * p99:+.0f} %",
                f"{100 * (one.blind_p99_ms / one.measured_p99_ms - 1):+.0f} %",
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


# -- command ------------------------------------------------------------------------------------------------------------------


def write(made: Calibration, json_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


def read(json_file: Path) -> Calibration:
    return msgspec.json.decode(json_file.read_bytes(), type=Calibration)


def _say(words: str) -> None:
    print(f"calibrate: {words}", file=sys.stderr, flush=True)


def run(
    mix: str, *, quick: bool = False, seconds: float, command: str, loads: Iterable[float] = (), say: Say = _say
) -> Calibration:
    """`loads`: to be validated."""
    effort = QUICK if quick else FULL
    say("the path alone, in large batches")
    batched_ms = measure_batched(effort.share)
    programs, turns = population(mix), list[Turn]()
    with cluster() as here:
        found = gather(here, programs, batched_ms, effort, say)
        for number, load in product(range(effort.rounds), loads):
            seed = 100 * (number + 1) + int(100 * load)
            turns.append(take_turn(here, programs, load, seconds, seed, found))
            mean_ms = 1000 * fmean(turns[-1].measured_s)
            say(f"round {number + 1} of {effort.rounds}, {100 * load:.0f} % load: mean {mean_ms:.1f} ms")
        made = conclude(found, mix, here.slots, command)
    say("simulating the same")
    for load in dict.fromkeys(turn.load for turn in turns):
        same = [turn for turn in turns if turn.load == load]
        made.validation.append(point_of(same, [predict_turn(made, turn) for turn in same]))
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mix", choices=("rollout", "std"), default="rollout")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of six; a look, not a measurement")
    parser.add_argument("--validate", action="store_true", help="also compare with open-loop runs at four loads, in turns")
    parser.add_argument("--seconds", type=float, default=VALIDATE_S, help="of each such run")
    parser.add_argument("--json", type=Path, metavar="PATH", default=DEFAULT_JSON, help="where to write (default: %(default)s)")
    given = parser.parse_args(argv)
    words = ["--validate"] * given.validate + ["--quick"] * given.quick
    command = " ".join(["python -m loadtest.calibrate", "--mix", given.mix, *words])
    made = run(given.mix, quick=given.quick, seconds=given.seconds, command=command, loads=LOADS if given.validate else ())
    show(made)
    write(made, given.json)
    return 0 if all(point.good for point in made.validation) else 1


def in_words(cold: dict[str, float]) -> str:
    return ", ".join(f"{name} {factor:.2f} x" for name, factor in cold.items())


def fitted_words(made: Calibration) -> str:
    aside, delay_ms = 100 * made.costs.aside, 1000 * made.costs.hop_s
    return f"Fitted: costs x {made.unseen:.2f}, {aside:.0f} % of a program's after its answer, delay {delay_ms:.1f} ms."


def show(made: Calibration) -> None:
    per_call = ", ".join(f"{name} {value:.2f}" for name, value in made.cpu_ms.items())
    print(f"{made.capacity_per_s:.1f} calls/s on {made.cores} cores; CPU ms per call: {per_call}")
    print(f"On an idle machine a call costs: {in_words(made.cold)}.")
    print(fitted_words(made))
    if made.validation:
        print(validation_table(made.validation))
    if made.others_share > BUSY_SHARE:
        print(f"Others used {100 * made.others_share:.0f} % of the machine meanwhile: calibrate again when it is quiet.")


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
