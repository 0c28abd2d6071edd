"""The path without programs: an HTTP batch to a gateway, through Redis to a worker that only echoes: `make bench-path`.

Real processes on this machine: a Redis server, one gateway, workers with the runtime `echo`, and this process, which makes the
load on the same cores. Every result is compared with what was sent. The table has the CPU time per call of each stage.
"""

import contextlib
import http.client
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec import Struct

from loadtest.support import meter, redis_server, results
from loadtest.support.processes import Part
from loadtest.support.redis_server import RedisServer
from loadtest.support.results import EXIT_FAILED, percentile

MODULE = "loadtest.bench.path"
WANTED_PER_S = 10_000.0
WARM_UP_CALLS = 2000
Batch = tuple[bytes, list[str]]  # a request, and the output its calls must have


class Shape(NamedTuple):
    """How the load is made."""

    calls: int  # in one repeat
    batch: int
    connections: int
    code_bytes: int


class Echoed(Struct):
    """The fields of a result that are checked."""

    status: str
    stdout: str
    index: int


class Turn(NamedTuple):
    """One repeat."""

    calls_per_s: float
    wrong: int
    batches_s: list[float]
    cpu_us: dict[str, float]  # per call, by stage
    others_share: float  # of the cores, used by other processes


_decode_lines = msgspec.json.Decoder(Echoed).decode_lines


def batches(shape: Shape, turn: int) -> list[Batch]:
    made = []
    for start in range(0, shape.calls, shape.batch):
        numbers = range(start, min(start + shape.batch, shape.calls))
        codes = [f"call {turn} {number} ".ljust(shape.code_bytes, "x") for number in numbers]
        made.append((msgspec.json.encode({"calls": [{"code": code} for code in codes]}), codes))
    return made


def send(connection: http.client.HTTPConnection, body: bytes, codes: list[str]) -> int:
    """The number of wrong, missing and surplus results."""
    connection.request("POST", "/v1/batch", body, {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {data[:500]!r}")
    found = _decode_lines(data)
    right = {one.index for one in found if one.status == "ok" and one.stdout == codes[one.index]}
    return len(codes) - len(right) + len(found) - len(codes)


def make_load(url: str, requests: list[Batch], connections: int) -> tuple[float, int, list[float]]:
    """Wall time, wrong results, and the time of each request."""

    def work(own: list[Batch]) -> tuple[int, list[float]]:
        wrong, took_s = 0, []
        with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
            for body, codes in own:
                began = time.perf_counter()
                wrong += send(connection, body, codes)
                took_s.append(time.perf_counter() - began)
        return wrong, took_s

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        done = list(threads.map(work, [requests[at::connections] for at in range(connections)]))
    return time.perf_counter() - began, sum(wrong for wrong, _ in done), [one for _, took_s in done for one in took_s]


def measure(url: str, stages: dict[str, list[int]], shape: Shape, number: int) -> Turn:
    requests = batches(shape, number)
    busy, before = meter.machine_busy_s(), meter.stages_s(stages)
    wall_s, wrong, took_s = make_load(url, requests, shape.connections)
    used = {name: after - before[name] for name, after in meter.stages_s(stages).items()}
    others_share = meter.others_share(busy, sum(used.values()), wall_s)
    cpu_us = {name: 1e6 * seconds / shape.calls for name, seconds in used.items()}
    return Turn(shape.calls / wall_s, wrong, took_s, cpu_us, others_share)


@contextlib.contextmanager
def cluster(workers: int, slots: int) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The address of the gateway, and the processes by stage."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        gateway = stack.enter_context(Part.gateway(redis.url))
        parts = [stack.enter_context(Part.echo(redis.url, slots)) for _ in range(workers)]
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
    parser = results.parser(MODULE, __doc__)
    parser.add_argument("--calls", type=int, default=40_000, help="in one repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=500, help="calls in one request (default %(default)s)")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--code-bytes", type=int, default=200, help="size of a program (default %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=512, help="of each worker (default %(default)s)")
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the page there too")
    given = parser.parse_args(argv)
    shape = Shape(given.calls, given.batch, given.connections, given.code_bytes)
    about = results.about(MODULE, argv, server=redis_server.version())
    turns = []
    with cluster(given.workers, given.slots) as (url, stages):
        make_load(url, batches(shape._replace(calls=WARM_UP_CALLS), 0), shape.connections)
        for number in range(1, given.repeats + 1):
            turns.append(measure(url, stages, shape, number))
            print(f"path: {turns[-1].calls_per_s:.0f} calls/s", file=sys.stderr, flush=True)
    per_s = median(turn.calls_per_s for turn in turns)
    head = f"# The path without programs\n\nMedian **{per_s:.0f} calls/s** (wanted: {WANTED_PER_S:.0f})."
    results.write_page(f"{head}\n\n{table(turns)}\n\n{results.about_table(about)}", given.page)
    return 0 if per_s >= WANTED_PER_S and not any(turn.wrong for turn in turns) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
