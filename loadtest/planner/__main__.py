"""How many workers, gateways and Redis servers a load needs: `python -m loadtest.planner --calls-per-s 1500 --p99-ms 200`.

    python -m loadtest.planner --in-flight 45000 --mean-ms 300        calls in flight at every moment: by Little's law 150,000/s
    python -m loadtest.planner --measure --costs costs.json           measures the costs of this machine, about a minute, root

"45,000 calls" has two meanings. Per step: the calls of a training step arrive in bursts; `--calls-per-s` is the rate within a
burst, such as 45,000 calls / 6 bursts / 5 s = 1,500. In flight: 45,000 calls at every moment, each followed by the next.

The answer is a queueing formula (loadtest/planner/model.py) with measured costs per stage. It assumes cores like the measured
ones, calls that share requests as our client sends them, machines of their own for Redis, gateways and callers, and a network
that adds nothing.
"""

import http.client
import math
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec

from exec_wire import Result
from loadtest.bench import path
from loadtest.planner.model import Check, Costs, Latency, Plan, Unreachable, Wanted, latency_on_one_machine, plan
from loadtest.support import meter, redis_server, results
from loadtest.support.processes import Part, exit_on_sigterm
from loadtest.support.results import EXIT_UNAVAILABLE, EXIT_USAGE, percentile
from loadtest.support.workload import MIXES, Program, calls
from worker.config import default_slots, usable_cores

MODULE = "loadtest.planner"
COSTS = Path(__file__).with_name("costs.json")
# Measuring: a Redis server, a gateway, a worker and the load on this machine. First the path in large batches without programs,
# then one call at a time (unloaded), then every slot busy (saturated), with the CPU time of each stage. Last a check: calls at
# random times at half the capacity, beside what the model predicts.
PATH, PATH_SLOTS = path.Shape(calls=20_000, batch=500, connections=8, code_bytes=300), 512
SATURATED = 2  # calls in flight per slot
CHECK_LOAD, CHECK_THREADS = 0.5, 64
DEADLINE_S, OTHERS_MOST = 120.0, 0.05
SEED = 11


class Landed(NamedTuple):
    latency_ms: float  # from when the call was due
    cpu_ms: float  # of the program, by the kernel's count


def send(url: str, programs: list[Program], connections: int, due_s: list[float] | None = None) -> list[Landed]:
    """One call per request. `due_s`: when each call is sent, from the start; by default as soon as a connection is free."""
    own, began = threading.local(), time.perf_counter()

    def connect() -> None:
        own.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)

    def run(index: int) -> Landed:
        program, due = programs[index], time.perf_counter()
        if due_s is not None:
            due = began + due_s[index]
            time.sleep(max(0.0, due - time.perf_counter()))
        limits = {"wall_s": program.wall_s}
        body = {"code": program.code, "stdin": program.stdin, "limits": limits, "deadline_s": DEADLINE_S}
        own.connection.request("POST", "/v1/run", msgspec.json.encode(body), {"content-type": "application/json"})
        result = msgspec.json.decode(own.connection.getresponse().read(), type=Result)
        if result.blame == "infra" and result.status != "timeout":
            raise RuntimeError(f"a call failed, so its latency says nothing: {result.status}: {result.error}")
        return Landed(1000 * (time.perf_counter() - due), 1000 * result.usage.cpu_s)

    with ThreadPoolExecutor(connections, initializer=connect) as threads:
        return list(threads.map(run, range(len(programs))))


def cpu_s(stages: dict[str, list[int]]) -> dict[str, float]:
    """By stage, with the programs of the worker as one more; its processes change."""
    [worker] = stages["workers"]
    return meter.stages_s({**stages, "programs": [*meter.tree(worker)][1:]})


def measure(mix: str, count: int, argv: list[str] | None) -> Costs:
    about = results.about(MODULE, argv, server=redis_server.version())
    programs, cores, slots = calls(count, SEED, mix), usable_cores(), default_slots()
    say("the path in batches")
    with path.cluster(lambda redis: Part.echo(redis, PATH_SLOTS)) as (url, stages):
        path_us = path.measure(url, stages, PATH, 0).cpu_us
    with path.cluster(lambda redis: Part.worker(redis, min_tier="D")) as (url, stages):
        say("warming up")
        send(url, programs[:60], SATURATED * slots)
        say(f"{count} programs, one at a time")
        unloaded = send(url, programs, 1)
        say(f"{count} programs with every slot busy")
        busy, before, began = meter.machine_busy_s(), cpu_s(stages), time.perf_counter()
        saturated = send(url, programs, SATURATED * slots)
        wall_s = time.perf_counter() - began
        used_s = {name: value - before[name] for name, value in cpu_s(stages).items()}
        others = meter.others_share(busy, sum(used_s.values()), wall_s)
        about["others"] = f"{100 * others:.0f} % of the cores"
        if others > OTHERS_MOST:
            say(f"other processes used {about['others']}: measure again on an idle machine")
        ours_s = cores * wall_s * max(0.05, 1 - others)
        # The stages share all CPU time that is left to them; what no process is charged for is spread over all stages.
        scale = 1000 * ours_s / sum(used_s.values()) / count
        program_ms = [landed.cpu_ms for landed in saturated]
        costs = Costs(
            about,
            mix,
            cores,
            round(slots / cores, 2),
            round(count * cores / ours_s, 1),
            round(path_us["gateway"] / 1000, 4),
            round(path_us["redis"] / 1000, 4),
            round(scale * used_s["workers"], 4),
            round(scale * used_s["programs"], 4),
            program_scv=round(pvariance(program_ms) / fmean(program_ms) ** 2, 3),
            program_p99_ms=round(percentile(program_ms, 0.99), 2),
            unloaded_ms=round(fmean(landed.latency_ms for landed in unloaded), 2),
        )
        return msgspec.structs.replace(costs, checks=[check(url, costs, programs)])


def check(url: str, costs: Costs, programs: list[Program]) -> Check:
    per_s, chance = CHECK_LOAD * costs.capacity_per_s, random.Random(SEED)
    say(f"check: {per_s:.0f} calls/s at random times")
    due_s, at_s = [], 0.0
    for _ in programs:
        at_s += chance.expovariate(per_s)
        due_s.append(at_s)
    found = [landed.latency_ms for landed in send(url, chance.sample(programs, len(programs)), CHECK_THREADS, due_s)]
    predicted = latency_on_one_machine(costs, per_s)
    measured = round(fmean(found), 1), round(percentile(found, 0.99), 1)
    return Check(round(per_s, 1), *measured, round(predicted.mean_ms, 1), round(predicted.p99_ms, 1))


def say(words: str) -> None:
    print(f"planner: {words}", file=sys.stderr, flush=True)


def shown(found: Latency) -> str:
    if math.isinf(found.mean_ms):
        return f"overloaded: {100 * found.busy:.0f} % of the cores would be needed, the queue grows"
    return f"mean {found.mean_ms:.0f} ms, p99 {found.p99_ms:.0f} ms, the workers' cores {100 * found.busy:.0f} % busy"


def page(found: Plan, costs: Costs) -> str:
    fleet, wanted = found.fleet, found.wanted
    stages = "gateway_ms", "redis_ms", "worker_ms", "program_ms"
    limits = ((wanted.mean_ms, "mean"), (wanted.p99_ms, "p99"))
    return "\n".join(
        [
            f"load     {wanted.calls_per_s:,.0f} calls/s of the {costs.mix} mix, "
            + " and ".join(f"{name} at most {value:g} ms" for value, name in limits if math.isfinite(value)),
            f"cluster  {fleet.workers:,} workers of {fleet.cores_per_worker} cores, {fleet.gateways:,} gateways, "
            f"{fleet.redis_servers:,} Redis servers ({100 * found.redis_busy:.0f} % busy)"
            + (", one queue" if fleet.redis_servers > 1 else ""),
            f"latency  {shown(found.latency)}",
            f"crash    of one worker: about {found.restarted} calls are started again and take "
            f"{found.restarted_ms / 1000:.1f} s, none is lost; until it is replaced: {shown(found.after_death)}",
            "costs    CPU ms per call: " + ", ".join(f"{name[:-3]} {getattr(costs, name):.2f}" for name in stages),
            "         " + ", ".join(costs.about[name] for name in ("command", "started", "commit", "cpu")),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--calls-per-s", type=float, metavar="N")
    load.add_argument("--in-flight", type=float, metavar="N", help="calls at every moment; needs --mean-ms")
    load.add_argument("--measure", action="store_true", help="measure the costs and write them to --costs")
    parser.add_argument("--mean-ms", type=float, default=math.inf, help="the wanted mean latency")
    parser.add_argument("--p99-ms", type=float, default=math.inf, help="the wanted 99th percentile of the latency")
    parser.add_argument("--cores-per-worker", type=int, default=16, metavar="N", help="default %(default)s")
    parser.add_argument("--mix", choices=MIXES, default="rollout", help="of programs to measure (default %(default)s)")
    parser.add_argument("--programs", type=int, default=300, help="to measure (default %(default)s)")
    parser.add_argument("--costs", type=Path, metavar="PATH", default=COSTS, help="default: %(default)s")
    given = parser.parse_args(argv)
    if given.measure:
        if not results.is_root("planner"):
            return EXIT_UNAVAILABLE
        found = measure(given.mix, given.programs, argv)
        results.write_json(found, given.costs)
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    if not given.calls_per_s and not given.in_flight:
        parser.error("--calls-per-s or --in-flight is missing")
    if min(given.mean_ms, given.p99_ms) == math.inf or (given.in_flight and math.isinf(given.mean_ms)):
        parser.error("--mean-ms is missing" if given.in_flight else "--mean-ms or --p99-ms is missing")
    if min(given.calls_per_s or 1, given.in_flight or 1, given.mean_ms, given.p99_ms, given.cores_per_worker) <= 0:
        parser.error("every number must be greater than 0")
    try:
        costs = msgspec.json.decode(given.costs.read_bytes(), type=Costs)
        per_s = given.calls_per_s or 1000 * given.in_flight / given.mean_ms  # Little's law
        print(page(plan(costs, Wanted(per_s, given.mean_ms, given.p99_ms, given.cores_per_worker)), costs))
    except (OSError, msgspec.DecodeError, Unreachable) as error:
        print(f"planner: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
