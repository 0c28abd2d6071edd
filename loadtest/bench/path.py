"""The path without programs: an HTTP batch to a gateway, through Redis to a worker that only echoes: `make bench-path`.

Real processes on this machine: a Redis server, one gateway, workers with the runtime `echo`, and this process, which makes the
load on the same cores. Every call has an idempotency key, as those of our client, and every result is compared with what was
sent. The table has the CPU time per call of each stage.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from loadtest.support import meter, redis_server, results
from loadtest.support.processes import Part
from loadtest.support.redis_server import RedisServer
from loadtest.support.results import EXIT_FAILED, percentile
from loadtest.support.steady_load import Program, SteadyLoad

MODULE = "loadtest.bench.path"
WANTED_PER_S = 10_000.0
WARM_UP_CALLS = 2000


class Shape(NamedTuple):
    """How the load is made."""

    calls: int  # in one repeat
    batch: int
    connections: int
    code_bytes: int

    def program(self, name: str) -> Program:
        return Program.echo(f"{name} ".ljust(self.code_bytes, "x"))


class Turn(NamedTuple):
    """One repeat."""

    calls_per_s: float
    wrong: int  # wrong, missing and surplus results
    batches_s: list[float]
    cpu_us: dict[str, float]  # per call, by stage
    others_share: float  # of the cores, used by other processes


def measure(url: str, stages: dict[str, list[int]], shape: Shape, number: int) -> Turn:
    sizes = {"callers": shape.connections, "batch": shape.batch, "most": shape.calls}
    load = SteadyLoad(lambda: [url], shape.program, number, name=f"path-{number}", **sizes)
    busy, before, began = meter.machine_busy_s(), meter.stages_s(stages), time.perf_counter()
    with load:
        load.join()
    wall_s = time.perf_counter() - began
    used = {name: after - before[name] for name, after in meter.stages_s(stages).items()}
    others_share = meter.others_share(busy, sum(used.values()), wall_s)
    wrong = shape.calls - load.counts.right + load.counts.twice
    cpu_us = {name: 1e6 * seconds / shape.calls for name, seconds in used.items()}
    return Turn(shape.calls / wall_s, wrong, load.latencies_s, cpu_us, others_share)


@contextlib.contextmanager
def cluster(make_worker: Callable[[str], Part], workers: int = 1) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The address of the gateway, and the processes by stage. `make_worker`: from the address of Redis."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        gateway = stack.enter_context(Part.gateway(redis.url))
        parts = [stack.enter_context(make_worker(redis.url)) for _ in range(workers)]
        gateway.wait_for_workers(workers)
        pids = [part.pid for part in parts]
        yield gateway.url, {"gateway": [gateway.pid], "redis": [redis.pid], "workers": pids, "load": [os.getpid()]}


def table(turns: list[Turn]) -> str:
    stages = list(turns[0].cpu_us)
    rows = [
        [
            f"{turn.calls_per_s:.0f}",
            *(f"{1000 * percentile(turn.batches_s, share):.0f} ms" for share in (0.5, 0.95)),
            str(turn.wrong),
            *(f"{turn.cpu_us[name]:.0f} µs" for name in stages),
            f"{100 * turn.others_share:.0f} %",
        ]
        for turn in turns
    ]
    return results.markdown(["calls/s", "batch p50", "batch p95", "wrong", *stages, "others"], rows, 0)


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.add_argument("--calls", type=int, default=40_000, help="in one repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=500, help="calls in one request (default %(default)s)")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--code-bytes", type=int, default=200, help="size of a program (default %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=512, help="of each worker (default %(default)s)")
    given = parser.parse_args(argv)
    shape = Shape(given.calls, given.batch, given.connections, given.code_bytes)
    about = results.about(MODULE, argv, server=redis_server.version())
    turns = []
    with cluster(lambda redis: Part.echo(redis, given.slots), given.workers) as (url, stages):
        measure(url, stages, shape._replace(calls=WARM_UP_CALLS), 0)
        for number in range(1, given.repeats + 1):
            turns.append(measure(url, stages, shape, number))
            print(f"path: {turns[-1].calls_per_s:.0f} calls/s", file=sys.stderr, flush=True)
    per_s = median(turn.calls_per_s for turn in turns)
    head = f"# The path without programs\n\nMedian **{per_s:.0f} calls/s** (wanted: {WANTED_PER_S:.0f})."
    results.write_page(f"{head}\n\n{table(turns)}\n\n{results.about_table(about)}", given.page)
    return 0 if per_s >= WANTED_PER_S and not any(turn.wrong for turn in turns) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
