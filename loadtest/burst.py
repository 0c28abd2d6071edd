"""Many calls in flight at once: `make burst`, or `python -m loadtest.burst --help`.

A Redis and a gateway, and no worker: one tenant sends everything and the gateway accepts it. Only when all of it is inside do
the workers come. From then on a second tenant makes single calls, one after the other, until the burst is over. Every result is
compared with what was sent. For each size all processes are new, so that each has a memory peak of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from loadtest import facts, meter, redis_server
from loadtest.parts import Part
from loadtest.redis_server import RedisServer
from loadtest.results import percentile
from loadtest.steady_load import Books, Program, SteadyLoad
from worker.config import default_packages
from worker.sandbox.jail import interpreter

SIZES = [1000, 5000, 15_000, 45_000]
DEADLINE_S = 900.0
BATCH = 1500  # calls in one request
GATEWAY_MOST_BYTES, REDIS_MOST_BYTES, OTHER_P99_MS = 1_500_000_000, 200_000_000, 1000.0
ECHO_WORKERS, ECHO_SLOTS = 2, 256
ACCEPT_S = 120.0


class Burst(Struct, frozen=True):
    """One size. Times from when the first worker was there."""

    sandboxed: bool
    calls: int
    in_flight: int  # when the first worker came
    accepted_in_s: float
    books: Books
    wall_s: float
    calls_per_s: float
    call_p50_s: float  # from acceptance to the result
    call_p99_s: float
    other_calls: int  # of the second tenant
    other_p50_ms: float
    other_p99_ms: float
    other_most_ms: float
    gateway_bytes: int  # the peak, resident
    redis_bytes: int  # the peak, by its own count
    others_share: float  # of the machine, used by processes that are not ours

    def misses(self) -> list[str]:
        """What is not as it should be, in words."""
        right = self.books == Books(accepted=self.calls, answered=self.calls, right=self.calls)
        checks = {
            f"not exactly {self.calls} right results: {self.books}": right,
            f"only {self.in_flight} in flight at once": self.in_flight == self.calls,
            "the gateway's memory": self.gateway_bytes <= GATEWAY_MOST_BYTES,
            "Redis' memory": self.redis_bytes <= REDIS_MOST_BYTES,
            f"the second tenant's p99 of {self.other_p99_ms:.0f} ms": self.other_p99_ms <= OTHER_P99_MS,
        }
        return [words for words, met in checks.items() if not met]


class Second:
    """The second tenant: one call at a time, each timed, until it is stopped."""

    def __init__(self, url: str, program: Program) -> None:
        self.latencies_ms: list[float] = []
        self.wrong = 0
        self._address, self._program = url.removeprefix("http://"), program
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Second:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _work(self) -> None:
        body = msgspec.json.encode({"code": self._program.code, "tenant": "second", "deadline_s": 60})
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=60)) as connection:
            while not self._stop.wait(0.02):
                began = time.perf_counter()
                connection.request("POST", "/v1/run", body, {"content-type": "application/json"})
                answer = msgspec.json.decode(connection.getresponse().read())
                self.latencies_ms.append(1000 * (time.perf_counter() - began))
                self.wrong += answer.get("stdout") != self._program.stdout


def burst(calls: int, *, sandboxed: bool) -> Burst:
    program = Program.python if sandboxed else Program.echo
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        gateway = stack.enter_context(Part.gateway(redis.url))
        callers = -(-calls // BATCH)
        load = SteadyLoad(
            lambda: [gateway.url], program, 1, name="first", callers=callers, batch=BATCH, most=calls, deadline_s=DEADLINE_S
        )
        began = time.monotonic()
        stack.enter_context(load)
        in_flight = wait_accepted(gateway, calls)
        accepted_in_s = time.monotonic() - began
        workers = add_workers(stack, redis.url, sandboxed=sandboxed)
        pids = [redis.pid, gateway.pid, os.getpid(), *(worker.pid for worker in workers)]
        served, busy, own = time.monotonic(), meter.machine_busy_s(), used_s(pids)
        with Second(gateway.url, program("second")) as second:
            load.join()
            wall_s = time.monotonic() - served
        others_s = max(0.0, meter.machine_busy_s() - busy - (used_s(pids) - own))
        if second.wrong:
            raise RuntimeError(f"{second.wrong} wrong results of the second tenant")
        return Burst(
            sandboxed,
            calls,
            in_flight,
            round(accepted_in_s, 2),
            load.books,
            round(wall_s, 2),
            round(calls / wall_s, 1),
            round(percentile(load.stays_ms, 0.5) / 1000, 3),
            round(percentile(load.stays_ms, 0.99) / 1000, 3),
            len(second.latencies_ms),
            round(percentile(second.latencies_ms, 0.5), 1),
            round(percentile(second.latencies_ms, 0.99), 1),
            round(max(second.latencies_ms), 1),
            meter.peak_bytes(gateway.pid),
            redis.info("used_memory_peak"),
            round(others_s / wall_s / (os.cpu_count() or 1), 3),
        )


def used_s(pids: list[int]) -> float:
    return sum(meter.cpu_s(pid) for root in pids for pid in (meter.tree(root) if root != os.getpid() else [root]))


def wait_accepted(gateway: Part, calls: int) -> int:
    give_up = time.monotonic() + ACCEPT_S
    while (inside := int(gateway.metrics()["exec_in_flight"])) < calls and time.monotonic() < give_up:
        time.sleep(0.05)
    return inside


def add_workers(stack: contextlib.ExitStack, redis: str, *, sandboxed: bool) -> list[Part]:
    if sandboxed:
        return [stack.enter_context(Part.worker(redis))]
    return [stack.enter_context(Part.echo(redis, ECHO_SLOTS)) for _ in range(ECHO_WORKERS)]


# -- report -------------------------------------------------------------------------------------------------------------------


class BurstResults(Struct):
    started: str
    commit: str
    machine: dict[str, str]
    server: str
    bursts: list[Burst] = []


COLUMNS = (
    *("workers", "in flight", "accepted in", "right results", "calls/s", "call p50", "call p99"),
    *("second tenant p50", "p99", "most", "gateway", "Redis", "others"),
)


def row(one: Burst) -> list[str]:
    return [
        "sandbox" if one.sandboxed else "echo",
        f"{one.in_flight:,}",
        f"{one.accepted_in_s:.1f} s",
        f"{one.books.right:,}",
        f"{one.calls_per_s:,.0f}",
        f"{one.call_p50_s:.2f} s",
        f"{one.call_p99_s:.2f} s",
        f"{one.other_p50_ms:.0f} ms",
        f"{one.other_p99_ms:.0f} ms",
        f"{one.other_most_ms:.0f} ms",
        f"{one.gateway_bytes / 1e6:.0f} MB",
        f"{one.redis_bytes / 1e6:.1f} MB",
        f"{100 * one.others_share:.0f} %",
    ]


def table(bursts: list[Burst]) -> str:
    rows = [list(COLUMNS), ["---"] + ["---:"] * (len(COLUMNS) - 1), *map(row, bursts)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


PAGE = """# Bursts

One tenant has so many calls in flight at once: all of them are accepted before the first worker comes. Then the workers serve
them while a second tenant makes single calls, one after the other. Every result is compared with what was sent. `echo`: the
path alone, {workers} workers of {slots} slots that run nothing. `sandbox`: one worker, a slot per core, `deadline_s`
{deadline:g}. The gateway, Redis, workers and the load share the machine. Memory: peaks, resident for the gateway, by its own
count for Redis.

Wanted: every result right, gateway ≤ {gateway:g} MB, Redis ≤ {redis:g} MB, the second tenant's p99 ≤ {p99:g} ms. {verdict}

{table}

![Calls per second, latency and memory by the number of calls in flight]({picture})

| | |
| --- | --- |
{about}
"""


def write(results: BurstResults, json_file: Path) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    picture = json_file.with_suffix(".png")
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"PATH": os.defpath, "PYTHONPATH": default_packages(), "MPLBACKEND": "Agg", "MPLCONFIGDIR": scratch}
        script = Path(__file__).with_name("burst_plot.py")
        subprocess.run([interpreter(), str(script), str(json_file), str(picture)], env=environment, check=True)
    missed = [f"{row(one)[0]} {one.calls}: {words}" for one in results.bursts for words in one.misses()]
    about = {**results.machine, "server": results.server, "commit": results.commit, "started": results.started}
    page = PAGE.format(
        workers=ECHO_WORKERS,
        slots=ECHO_SLOTS,
        deadline=DEADLINE_S,
        gateway=GATEWAY_MOST_BYTES / 1e6,
        redis=REDIS_MOST_BYTES / 1e6,
        p99=OTHER_P99_MS,
        verdict=f"**Missed**: {'; '.join(missed)}." if missed else "All met.",
        table=table(results.bursts),
        picture=picture.name,
        about="\n".join(f"| {name} | {value} |" for name, value in about.items()),
    )
    json_file.with_suffix(".md").write_text(page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], default=SIZES)
    parser.add_argument("--sandboxed", action="store_true", help="by real sandboxes: about 100 calls/s on two cores")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where to write the results, a page and a picture beside them"
    )
    parser.add_argument("--add", action="store_true", help="to what is in that file already, in place of the same sizes")
    given = parser.parse_args(argv)
    results = BurstResults(facts.now(), facts.commit(), facts.machine(), redis_server.version(), [])
    if given.add:
        kept = msgspec.json.decode(given.json.read_bytes(), type=BurstResults).bursts
        results.bursts = [one for one in kept if one.sandboxed != given.sandboxed or one.calls not in given.sizes]
    for size in given.sizes:
        one = burst(size, sandboxed=given.sandboxed)
        results.bursts.append(one)
        print(" ".join(row(one)), *one.misses(), sep="  ", file=sys.stderr, flush=True)
    results.bursts.sort(key=lambda one: (one.sandboxed, one.calls))
    print(table(results.bursts))
    if given.json:
        write(results, given.json)
    return 1 if any(one.misses() for one in results.bursts) else 0


if __name__ == "__main__":
    sys.exit(main())
