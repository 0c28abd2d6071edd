"""Many calls in flight at once: `make burst`, or `python -m loadtest.burst --help`.

A Redis and a gateway, and no worker: one tenant sends everything, from several processes over HTTP or gRPC, and the gateway
accepts it. Only when the gateway's own gauge says that all of it is inside do the workers come. From then on a second tenant
makes single calls, one after the other, until the burst is over. Every result is compared with what was sent. For each run all
processes are new, so that each has a memory peak of its own.

Calls travel in batches, so that 45,000 need a few dozen connections; with `--batch 1` each has one of its own, within what the
limits on descriptors and ports allow.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from loadtest import burst_load, facts, meter, redis_server
from loadtest.burst_load import Order, Share
from loadtest.parts import Part, end_in_order
from loadtest.ports import free_port
from loadtest.redis_server import RedisServer
from loadtest.results import percentile
from loadtest.steady_load import Books, Program, together
from worker.config import default_packages
from worker.sandbox.jail import interpreter

SIZES = [1000, 5000, 15_000, 45_000]
TRANSPORTS, RUNS = ("http", "grpc"), ("echo", "sandbox")
DEADLINE_S = 900.0
BATCH = 1500  # calls in one request
LOAD_PROCESSES = 3
GATEWAY_MOST_BYTES, REDIS_MOST_BYTES, OTHER_P99_MS = 1_500_000_000, 200_000_000, 1000.0
ECHO_WORKERS, ECHO_SLOTS = 2, 256
ACCEPT_S = 120.0
SPARE_FILES = 200  # of a process, for what is not a call's connection
EXIT_USAGE = 2


class Burst(Struct, frozen=True):
    """One run. Times from when the first worker was there."""

    transport: str
    sandboxed: bool
    calls: int
    processes: int  # that made the load
    in_flight: int  # by the gateway's gauge, when the first worker came
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
    bytes_of: dict[str, int]  # peaks of the other processes; `sandboxes`: all of them together at the end, shared pages once
    cpu_ms: dict[str, float]  # per call, by stage
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
            while not self.latencies_ms or not self._stop.wait(0.02):
                began = time.perf_counter()
                connection.request("POST", "/v1/run", body, {"content-type": "application/json"})
                answer = msgspec.json.decode(connection.getresponse().read())
                self.latencies_ms.append(1000 * (time.perf_counter() - began))
                self.wrong += answer.get("stdout") != self._program.stdout


def burst(
    calls: int, *, transport: str = "http", sandboxed: bool, processes: int = LOAD_PROCESSES, batch: int = BATCH
) -> Burst:
    program = Program.python if sandboxed else Program.echo
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        grpc_port = free_port() if transport == "grpc" else 0
        gateway = stack.enter_context(Part.gateway(redis.url, "--grpc-port", str(grpc_port)))
        url = f"grpc://127.0.0.1:{grpc_port}" if grpc_port else gateway.url
        stages = {"gateway": [gateway.pid], "redis": [redis.pid]}
        before = used_s(stages)
        began = time.monotonic()
        loads = [burst_load.start(order) for order in orders(url, calls, processes, batch, sandboxed=sandboxed)]
        stack.callback(kill, loads)
        in_flight = wait_accepted(gateway, calls)
        accepted_in_s = time.monotonic() - began
        workers = add_workers(stack, redis.url, sandboxed=sandboxed)
        stages |= stages_of(workers)
        before |= used_s({name: pids for name, pids in stages.items() if name not in before})
        served, busy, own = time.monotonic(), meter.machine_busy_s(), ours_s(stages, loads)
        with Second(gateway.url, program("second")) as second:
            shares = [burst_load.finish(load) for load in loads]
            wall_s = time.monotonic() - served
        spent = {name: value - before[name] for name, value in used_s(stages_of(workers) | stages).items()}
        spent["load"] = sum(share.cpu_s for share in shares)
        loaded_s = sum(spent.values()) - (own - sum(before.values()))
        others_share = min(1.0, meter.others_share(busy, loaded_s, wall_s))
        if second.wrong:
            raise RuntimeError(f"{second.wrong} wrong results of the second tenant")
        stays_ms = [stay for share in shares for stay in share.stays_ms]
        return Burst(
            transport,
            sandboxed,
            calls,
            processes,
            in_flight,
            round(accepted_in_s, 2),
            together(share.books for share in shares),
            round(wall_s, 2),
            round(calls / wall_s, 1),
            round(percentile(stays_ms, 0.5) / 1000, 3),
            round(percentile(stays_ms, 0.99) / 1000, 3),
            len(second.latencies_ms),
            round(percentile(second.latencies_ms, 0.5), 1),
            round(percentile(second.latencies_ms, 0.99), 1),
            round(max(second.latencies_ms), 1),
            meter.peak_bytes(gateway.pid),
            redis.info("used_memory_peak"),
            memory_of(workers, shares, sandboxed=sandboxed),
            {name: round(1000 * seconds / calls, 4) for name, seconds in spent.items()},
            round(others_share, 3),
        )


def orders(url: str, calls: int, processes: int, batch: int, *, sandboxed: bool) -> list[Order]:
    """The burst in parts that differ by one call at most."""
    parts = [calls // processes + (n < calls % processes) for n in range(processes)]
    return [Order(url, f"first{n}", "first", part, batch, DEADLINE_S, sandboxed) for n, part in enumerate(parts) if part]


def kill(loads: Sequence[subprocess.Popen[bytes]]) -> None:
    for load in loads:
        if load.poll() is None:
            load.kill()
            load.wait()


def stages_of(workers: list[Part]) -> dict[str, list[int]]:
    pids = [worker.pid for worker in workers]
    inner = [pid for root in pids for pid in meter.tree(root) if pid != root]
    return {"workers": pids} | ({"sandboxes": inner} if inner else {})


def used_s(stages: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(meter.cpu_s, pids)) for name, pids in stages.items()}


def ours_s(stages: dict[str, list[int]], loads: Sequence[subprocess.Popen[bytes]]) -> float:
    return sum(used_s(stages).values()) + sum(meter.cpu_s(load.pid) for load in loads)


def memory_of(workers: list[Part], shares: list[Share], *, sandboxed: bool) -> dict[str, int]:
    found = {f"worker {n}": meter.peak_bytes(worker.pid) for n, worker in enumerate(workers, 1)}
    found |= {f"load {n}": share.peak_bytes for n, share in enumerate(shares, 1)}
    if sandboxed:
        found["sandboxes"] = sum(meter.pss_bytes(worker.pid) for worker in workers)
    return found


def too_many(calls: int, batch: int, transport: str) -> str:
    """Words if so many connections are more than descriptors or ports allow."""
    if transport == "grpc":
        return ""  # calls share a few connections
    connections = -(-calls // batch)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    advice = f"take --batch {-(-calls // min(files, high - low))} or more"
    if connections > files:
        return f"{connections} connections to one gateway, which may have {files} (ulimit -n): {advice}"
    if connections > high - low:
        return f"{connections} connections to one address, for which there are {high - low} ports: {advice}"
    return ""


def wait_accepted(gateway: Part, calls: int) -> int:
    give_up = time.monotonic() + ACCEPT_S
    while (inside := int(gateway.metrics()["exec_in_flight"])) < calls and time.monotonic() < give_up:
        time.sleep(0.05)
    return inside


def add_workers(stack: contextlib.ExitStack, redis: str, *, sandboxed: bool) -> list[Part]:
    """Ready is the first of them: it does not wait for the others."""
    workers = [Part.worker(redis)] if sandboxed else [Part.echo(redis, ECHO_SLOTS) for _ in range(ECHO_WORKERS)]
    for worker in workers:
        stack.callback(worker.close)
    workers[0].wait_ready()
    return workers


# -- report -------------------------------------------------------------------------------------------------------------------


class BurstResults(Struct):
    started: str
    commit: str
    command: str
    machine: dict[str, str]
    server: str
    bursts: list[Burst] = []


COLUMNS = (
    *("over", "workers", "in flight", "accepted in", "right results", "calls/s", "call p50", "call p99"),
    *("second tenant p50", "p99", "most", "gateway", "Redis", "others"),
)


def row(one: Burst) -> list[str]:
    return [
        one.transport,
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
    rows = [list(COLUMNS), ["---"] * 2 + ["---:"] * (len(COLUMNS) - 2), *map(row, bursts)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


STAGES = ("load", "gateway", "redis", "workers", "sandboxes")


def cost_table(bursts: list[Burst]) -> str:
    """CPU per stage, and memory per process."""
    processes = list(dict.fromkeys(name for one in bursts for name in one.bytes_of))
    rows = [["", *(f"CPU {name}" for name in STAGES), *processes], ["---"] + ["---:"] * (len(STAGES) + len(processes))]
    for one in bursts:
        cpu = [f"{one.cpu_ms[name]:.3f} ms" if name in one.cpu_ms else "" for name in STAGES]
        memory = [f"{one.bytes_of[name] / 1e6:.0f} MB" if name in one.bytes_of else "" for name in processes]
        rows.append([f"{' '.join(row(one)[:2])} {one.calls:,}", *cpu, *memory])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


PAGE = """# Bursts

One tenant has so many calls in flight at once, sent by {processes} processes: all of them are accepted before the first worker
comes, by the gateway's own gauge (`exec_in_flight`). Then the workers serve them while a second tenant makes single calls, one
after the other. Every result is compared with what was sent. `echo`: the path alone, {workers} workers of {slots} slots that
run nothing. `sandbox`: one worker of the default number of slots, `deadline_s` {deadline:g}. Gateway, Redis, workers and load
share the machine. Memory: peaks, resident for the gateway, by its own count for Redis.

Wanted: every result right, gateway ≤ {gateway:g} MB, Redis ≤ {redis:g} MB, the second tenant's p99 ≤ {p99:g} ms. {verdict}

{table}

CPU time per call by stage, from when the first call was sent, and memory by process: peaks, but for `sandboxes`, which are all
of them together at the end.

{costs}

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
    missed = [f"{' '.join(row(one)[:2])} {one.calls}: {words}" for one in results.bursts for words in one.misses()]
    about = {**results.machine, "server": results.server, "commit": results.commit, "started": results.started}
    about["command"] = f"`{results.command}`"
    page = PAGE.format(
        workers=ECHO_WORKERS,
        slots=ECHO_SLOTS,
        deadline=DEADLINE_S,
        gateway=GATEWAY_MOST_BYTES / 1e6,
        redis=REDIS_MOST_BYTES / 1e6,
        p99=OTHER_P99_MS,
        verdict=f"**Missed**: {'; '.join(missed)}." if missed else "All met.",
        table=table(results.bursts),
        costs=cost_table(results.bursts),
        processes=results.bursts[0].processes if results.bursts else 0,
        picture=picture.name,
        about="\n".join(f"| {name} | {value} |" for name, value in about.items()),
    )
    json_file.with_suffix(".md").write_text(page)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], default=SIZES)
    parser.add_argument(
        "--transports", type=_some_of(TRANSPORTS), default=list(TRANSPORTS), help="of http,grpc (default: both)"
    )
    parser.add_argument(
        "--runs", type=_some_of(RUNS), default=["echo"], help="of echo,sandbox: the path alone, real ones (default echo)"
    )
    parser.add_argument("--processes", type=int, default=LOAD_PROCESSES, help="that make the load (default %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="calls in one request (default %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where to write the results, a page and a picture beside them"
    )
    parser.add_argument("--add", action="store_true", help="to what is in that file already, in place of the same runs")
    return parser.parse_args(argv)


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        if unknown := [word for word in text.split(",") if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return text.split(",")

    return read


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    for transport in given.transports:
        if words := too_many(max(given.sizes), given.batch, transport):
            print(f"burst: {words}", file=sys.stderr)
            return EXIT_USAGE
    sizes = ",".join(map(str, given.sizes))
    command = (
        f"python -m loadtest.burst --sizes {sizes} --transports {','.join(given.transports)} --runs {','.join(given.runs)}"
    )
    results = BurstResults(facts.now(), facts.commit(), command, facts.machine(), redis_server.version(), [])
    wanted = [
        (transport, run == "sandbox", size) for run in given.runs for transport in given.transports for size in given.sizes
    ]
    if given.add and given.json.exists():
        kept = msgspec.json.decode(given.json.read_bytes(), type=BurstResults).bursts
        results.bursts = [one for one in kept if (one.transport, one.sandboxed, one.calls) not in wanted]
    for number, (transport, sandboxed, size) in enumerate(wanted, 1):
        print(f"burst: {number}/{len(wanted)}: {size:,} over {transport}", file=sys.stderr, flush=True)
        one = burst(size, transport=transport, sandboxed=sandboxed, processes=given.processes, batch=given.batch)
        results.bursts.append(one)
        print(" ".join(row(one)), *one.misses(), sep="  ", file=sys.stderr, flush=True)
        results.bursts.sort(key=lambda one: (one.sandboxed, one.transport, one.calls))
        if given.json:  # after each: the long ones may be interrupted
            write(results, given.json)
    print(table(results.bursts), cost_table(results.bursts), sep="\n\n")
    return 1 if any(one.misses() for one in results.bursts) else 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
