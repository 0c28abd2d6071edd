"""The path alone: an HTTP batch to a gateway, through Redis to a worker that runs nothing, and back.

`make bench-path`, or `python -m loadtest.path --help`. Real processes on this machine: a Redis of its own, one gateway, workers
with the runtime `echo`, and this process, which makes the load on the same cores. Every result is compared with what was sent.
"""

from __future__ import annotations

import argparse
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

from loadtest import facts, meter, redis_server
from loadtest.parts import Part
from loadtest.redis_server import RedisServer
from loadtest.results import percentile

WANTED_PER_S = 10_000.0
EXIT_MISSED, EXIT_WRONG = 1, 3


class Shape(NamedTuple):
    """How the load is made."""

    calls: int  # in one repeat
    batch: int
    connections: int
    code_bytes: int


class Echoed(Struct):
    """What the load looks at of a result."""

    status: str
    stdout: str
    index: int


class Turn(Struct, frozen=True):
    """One repeat. CPU times are of whole processes, per call."""

    calls: int
    wall_s: float
    wrong: int
    batch_p50_ms: float
    batch_p95_ms: float
    cpu_us: dict[str, float]
    others_share: float  # of the machine's cores, used by processes that are not ours

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.wall_s


class PathResults(Struct):
    started: str
    commit: str
    machine: dict[str, str]
    server: str
    shape: dict[str, int]
    workers: int
    slots: int
    wanted_calls_per_s: float
    calls_per_s: float = 0.0  # the median
    turns: list[Turn] = []


_decode_lines = msgspec.json.Decoder(Echoed).decode_lines


def bodies(shape: Shape, turn: int) -> list[tuple[bytes, list[str]]]:
    """Requests, and what their calls must print."""
    made = []
    for start in range(0, shape.calls, shape.batch):
        numbers = range(start, min(start + shape.batch, shape.calls))
        codes = [f"call {turn} {number} ".ljust(shape.code_bytes, "x") for number in numbers]
        made.append((msgspec.json.encode({"calls": [{"code": code} for code in codes]}), codes))
    return made


def send(connection: http.client.HTTPConnection, body: bytes, codes: list[str]) -> int:
    """How many of its results are not right."""
    connection.request("POST", "/v1/batch", body, {"content-type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {data[:500]!r}")
    results = _decode_lines(data)
    right = {one.index for one in results if one.status == "ok" and one.stdout == codes[one.index]}
    return len(codes) - len(right) + len(results) - len(codes)


def make_load(url: str, requests: list[tuple[bytes, list[str]]], connections: int) -> tuple[float, int, list[float]]:
    """Wall time, wrong results, and how long each request took."""
    address = url.removeprefix("http://")

    def work(own: list[tuple[bytes, list[str]]]) -> tuple[int, list[float]]:
        wrong, took_s = 0, []
        with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
            for body, codes in own:
                began = time.perf_counter()
                wrong += send(connection, body, codes)
                took_s.append(time.perf_counter() - began)
        return wrong, took_s

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        done = list(threads.map(work, [requests[at::connections] for at in range(connections)]))
    return time.perf_counter() - began, sum(wrong for wrong, _ in done), [one for _, took_s in done for one in took_s]


class Bench:
    def __init__(self, url: str, pids: dict[str, list[int]], shape: Shape) -> None:
        self._url, self._pids, self._shape = url, pids, shape

    def _used_s(self) -> dict[str, float]:
        return {name: sum(map(meter.cpu_s, pids)) for name, pids in self._pids.items()}

    def turn(self, number: int) -> Turn:
        requests = bodies(self._shape, number)
        busy, before = meter.machine_busy_s(), self._used_s()
        wall_s, wrong, took_s = make_load(self._url, requests, self._shape.connections)
        used = {name: after - before[name] for name, after in self._used_s().items()}
        others_share = meter.others_share(busy, sum(used.values()), wall_s)
        return Turn(
            self._shape.calls,
            round(wall_s, 4),
            wrong,
            round(1000 * percentile(took_s, 0.5), 2),
            round(1000 * percentile(took_s, 0.95), 2),
            {name: round(1e6 * seconds / self._shape.calls, 1) for name, seconds in used.items()},
            round(others_share, 3),
        )


@contextlib.contextmanager
def cluster(workers: int, slots: int) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The address of the gateway, and the processes by what they are."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        gateway = stack.enter_context(Part.gateway(redis.url))
        parts = [stack.enter_context(Part.echo(redis.url, slots)) for _ in range(workers)]
        pids = {"gateway": [gateway.pid], "redis": [redis.pid], "workers": [part.pid for part in parts], "load": [os.getpid()]}
        gateway.wait_for_workers(workers)
        yield gateway.url, pids


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=40_000, help="in one repeat (default 40000)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=500, help="calls in one request (default 500)")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--code-bytes", type=int, default=200, help="size of a program (default 200)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=512, help="of each worker (default 512)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the results, and a page beside them")
    given = parser.parse_args(argv)
    shape = Shape(given.calls, given.batch, given.connections, given.code_bytes)
    results = measure(shape, given.repeats, given.workers, given.slots)
    print(table(results))
    if given.json:
        write(results, given.json)
    if any(turn.wrong for turn in results.turns):
        return EXIT_WRONG
    return EXIT_MISSED if results.calls_per_s < WANTED_PER_S else 0


def measure(shape: Shape, repeats: int, workers: int, slots: int) -> PathResults:
    results = PathResults(
        facts.now(),
        facts.commit(),
        facts.machine(),
        redis_server.version(),
        shape._asdict(),
        workers,
        slots,
        WANTED_PER_S,
        turns=[],
    )
    with cluster(workers, slots) as (url, pids):
        bench = Bench(url, pids, shape)
        make_load(url, bodies(shape._replace(calls=2000), 0), shape.connections)  # connections, code that runs the first time
        for number in range(1, repeats + 1):
            turn = bench.turn(number)
            results.turns.append(turn)
            print(f"{turn.calls_per_s:.0f} calls/s, CPU us per call: {turn.cpu_us}", file=sys.stderr)
    results.calls_per_s = round(median(turn.calls_per_s for turn in results.turns), 1)
    return results


COLUMNS = ("calls/s", "batch p50", "batch p95", "wrong", "gateway", "redis", "workers", "load", "others")


def table(results: PathResults) -> str:
    rows = [
        [
            f"{turn.calls_per_s:.0f}",
            f"{turn.batch_p50_ms:.0f} ms",
            f"{turn.batch_p95_ms:.0f} ms",
            str(turn.wrong),
            *(f"{turn.cpu_us[name]:.0f} µs" for name in ("gateway", "redis", "workers", "load")),
            f"{100 * turn.others_share:.0f} %",
        ]
        for turn in results.turns
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---:"] * len(COLUMNS), *rows))


PAGE = """# The path alone

HTTP batch → gateway → Redis → worker → gateway → NDJSON stream, with workers that run nothing (`--runtime echo`): what the
service itself costs. One gateway, {workers} worker of {slots} slots, one Redis and the load generator share the machine; the
load keeps {connections} requests of {batch} calls with {code_bytes} bytes of code each in flight. Every result is compared with
what was sent. CPU times are per call.

Median **{median:.0f} calls/s** (wanted: at least {wanted:.0f}).

{table}

| | |
| --- | --- |
{facts}
"""


def write(results: PathResults, json_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    about = {**results.machine, "server": results.server, "commit": results.commit, "started": results.started}
    page = PAGE.format(
        workers=results.workers,
        slots=results.slots,
        median=results.calls_per_s,
        wanted=results.wanted_calls_per_s,
        table=table(results),
        facts="\n".join(f"| {name} | {value} |" for name, value in about.items()),
        **results.shape,
    )
    json_file.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    sys.exit(main())
