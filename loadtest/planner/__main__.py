"""How many workers, gateways and Redis servers a load needs: `python -m loadtest.planner --calls-per-s 1500 --p99-ms 200`.

    python -m loadtest.planner --in-flight 45000 --mean-ms 300        calls in flight at every moment: by Little's law 150,000/s
    python -m loadtest.planner --measure --costs costs.json           measures the costs of this machine, about a minute, root

"45,000 calls" has two meanings. Per step: the calls of a training step arrive in bursts; `--calls-per-s` is the rate within a
burst, such as 45,000 calls / 6 bursts / 5 s = 1,500. In flight: 45,000 calls at every moment, each followed by the next.

The answer is a queueing formula (loadtest/planner/model.py) with measured costs per stage. It assumes cores like the measured
ones, calls that share requests as our client sends them, machines of their own for Redis, gateways and callers, and a network
that adds nothing.
"""

import math
import sys
from pathlib import Path

import msgspec

from loadtest.planner.measure import MODULE, measure
from loadtest.planner.model import Costs, Latency, Plan, Unreachable, Wanted, plan
from loadtest.support import results
from loadtest.support.processes import exit_on_sigterm
from loadtest.support.results import EXIT_UNAVAILABLE, EXIT_USAGE
from loadtest.support.workload import MIXES

COSTS = Path(__file__).with_name("costs.json")


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
            f"fleet    {fleet.workers:,} workers of {fleet.cores_per_worker} cores, {fleet.gateways:,} gateways, "
            f"{fleet.redis_servers:,} Redis servers ({100 * found.redis_busy:.0f} % busy)"
            + (", each with its share of workers and gateways" if fleet.redis_servers > 1 else ""),
            f"latency  {shown(found.latency)}",
            f"death    of one worker: about {found.restarted} calls are started again and take "
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
