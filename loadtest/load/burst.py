"""Many calls in flight at once: `make burst N=45000`.

Workers start, are stopped (SIGSTOP) and forgotten by the gateway. One tenant sends all calls, from several processes over HTTP
or gRPC. When the gateway's own gauge says that all calls are accepted, the workers go on. From then on a second tenant makes
single calls, one after the other, until the burst is over. Every result is compared with what was sent. All processes are new
in each run, so that memory peaks belong to it. Calls travel in batches, so that 45,000 need a few dozen connections; with
`--batch 1` each has its own connection, and needs as many descriptors (`ulimit -n`) and ports.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from msgspec import Struct

from exec_client._transport import Transport, make_transport
from exec_client.errors import ExecError
from exec_wire import Call
from loadtest.support import meter, redis_server, results
from loadtest.support.processes import Part, exit_on_sigterm, free_port
from loadtest.support.redis_server import RedisServer
from loadtest.support.results import EXIT_FAILED, markdown, percentile, some_of
from loadtest.support.steady_load import Counts, Program, add_up, time_single_calls

MODULE = "loadtest.load.burst"
TRANSPORTS, RUNS = ("http", "grpc"), ("echo", "sandbox")
DEADLINE_S = 900.0
GRACE_S = 30.0  # without a byte for so long after the deadline, the calls of a request are lost
GRPC_CHANNELS = 4  # HTTP/2 connections of a sender: the flow control of one would be the bottleneck
BATCH = 1500  # calls in one request
SENDERS = 3  # processes
GATEWAY_MOST_BYTES, REDIS_MOST_BYTES, SECOND_P99_MS = 1_500_000_000, 200_000_000, 1000.0
ECHO_WORKERS, ECHO_SLOTS = 2, 256
ACCEPT_S = 120.0
FORGET_S = 30.0  # until the gateway has forgotten workers that are stopped


class Burst(NamedTuple):
    """One run. Times count from when the workers went on."""

    transport: str
    sandboxed: bool
    calls: int
    in_flight: int  # by the gateway's gauge, when the workers went on
    accepted_in_s: float
    counts: Counts
    calls_per_s: float
    calls_s: list[float]  # from acceptance to result
    second_ms: list[float]  # latencies of the second tenant
    gateway_bytes: int  # peak of the resident memory
    redis_bytes: int  # peak, by Redis' own count
    cpu_ms: dict[str, float]  # per call, by stage

    def misses(self) -> list[str]:
        """The targets that were missed."""
        wanted = Counts(accepted=self.calls, answered=self.calls, right=self.calls)
        second_p99_ms = percentile(self.second_ms, 0.99)
        checks = {
            f"not exactly {self.calls} right results: {self.counts}": self.counts == wanted,
            f"only {self.in_flight} in flight at once": self.in_flight == self.calls,
            "the gateway's memory": self.gateway_bytes <= GATEWAY_MOST_BYTES,
            "Redis' memory": self.redis_bytes <= REDIS_MOST_BYTES,
            f"the second tenant's p99 of {second_p99_ms:.0f} ms": second_p99_ms <= SECOND_P99_MS,
        }
        return [words for words, met in checks.items() if not met]


class Order(Struct, frozen=True):
    url: str  # http:// or grpc://
    name: str
    tenant: str
    calls: int
    batch: int
    sandboxed: bool


class Share(Struct):
    """The results of one sender."""

    counts: Counts
    stays_ms: list[float]  # time in the service, by the gateway
    cpu_s: float = 0.0


def run_sender(order: Order) -> Share:
    """One attempt: the calls of a request that is refused or breaks are lost."""
    began = time.process_time()
    share = asyncio.run(send(order))
    share.cpu_s = time.process_time() - began
    return share


async def send(order: Order) -> Share:
    share = Share(Counts(notes={}), [])
    channels = [make_transport(order.url, {}, None) for _ in range(GRPC_CHANNELS if order.url.startswith("grpc") else 1)]
    starts = range(0, order.calls, order.batch)
    await asyncio.gather(*(_send_batch(channels[n % len(channels)], order, at, share) for n, at in enumerate(starts)))
    for channel in channels:
        await channel.aclose()
    return share


async def _send_batch(channel: Transport, order: Order, first: int, share: Share) -> None:
    make, counts = Program.python if order.sandboxed else Program.echo, share.counts
    wanted = [make(f"{order.name}-{n}") for n in range(first, min(first + order.batch, order.calls))]
    calls = [Call(one.code, deadline_s=DEADLINE_S, tenant=order.tenant) for one in wanted]
    missing = set(range(len(calls)))
    counts.accepted += len(calls)
    try:
        async for result in channel.send(calls, DEADLINE_S + GRACE_S):
            if result.index not in missing:
                counts.twice += 1
                continue
            missing.discard(result.index)
            share.stays_ms.append(result.timings.total_ms)
            counts.add(result, wanted[result.index].stdout)
    except ExecError as error:
        counts.note(f"{type(error).__name__}: {error}")
    counts.lost += len(missing)


def call_alone(url: str, program: Program, stop: threading.Event) -> list[float]:
    """The second tenant: one call after the other until `stop` is set, at least one; their latencies in ms."""
    latencies_ms: list[float] = []
    for latency_ms in time_single_calls(url, program, tenant="second", deadline_s=60):
        latencies_ms.append(latency_ms)
        if stop.wait(0.02):
            break
    return latencies_ms


def burst(calls: int, *, transport: str = "http", sandboxed: bool, senders: int = SENDERS, batch: int = BATCH) -> Burst:
    program = Program.python if sandboxed else Program.echo
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        grpc_port = free_port() if transport == "grpc" else 0
        gateway = stack.enter_context(Part.gateway(redis.url, "--grpc-port", str(grpc_port)))
        url = f"grpc://127.0.0.1:{grpc_port}" if grpc_port else gateway.url
        workers = stopped_workers(stack, gateway, redis.url, sandboxed=sandboxed)
        before = meter.stages_s(stages := {"gateway": [gateway.pid], "redis": [redis.pid]})
        began = time.monotonic()
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(senders))
        sent = pool.map_async(run_sender, orders(url, calls, senders, batch, sandboxed=sandboxed), chunksize=1)
        in_flight = wait_accepted(gateway, calls)
        accepted_in_s = time.monotonic() - began
        before |= meter.stages_s(stages_of(workers))
        served = time.monotonic()
        for worker in workers:
            worker.kill(signal.SIGCONT)
        stop = threading.Event()
        second = stack.enter_context(ThreadPoolExecutor(1)).submit(call_alone, gateway.url, program("second"), stop)
        stack.callback(stop.set)
        shares = sent.get()
        wall_s = time.monotonic() - served
        stop.set()
        spent = {name: value - before.get(name, 0.0) for name, value in meter.stages_s(stages | stages_of(workers)).items()}
        spent["load"] = sum(share.cpu_s for share in shares)
        return Burst(
            transport,
            sandboxed,
            calls,
            in_flight,
            accepted_in_s,
            add_up(share.counts for share in shares),
            calls / wall_s,
            [stay / 1000 for share in shares for stay in share.stays_ms],
            second.result(),
            meter.memory_bytes(gateway.pid, "VmHWM"),
            redis.info("used_memory_peak"),
            {name: 1000 * seconds / calls for name, seconds in spent.items()},
        )


def orders(url: str, calls: int, senders: int, batch: int, *, sandboxed: bool) -> list[Order]:
    """The burst in parts that differ by one call at most."""
    parts = [calls // senders + (n < calls % senders) for n in range(senders)]
    return [Order(url, f"first{n}", "first", part, batch, sandboxed) for n, part in enumerate(parts) if part]


def stages_of(workers: list[Part]) -> dict[str, list[int]]:
    pids = [worker.pid for worker in workers]
    inner = [pid for root in pids for pid in meter.tree(root) if pid != root]
    return {"workers": pids, "sandboxes": inner}


def wait_accepted(gateway: Part, calls: int) -> int:
    give_up = time.monotonic() + ACCEPT_S
    while (inside := int(gateway.metrics()["exec_in_flight"])) < calls and time.monotonic() < give_up:
        time.sleep(0.05)
    return inside


def stopped_workers(stack: contextlib.ExitStack, gateway: Part, redis: str, *, sandboxed: bool) -> list[Part]:
    """Workers that are ready and have no part in anything until they go on: their start is not measured."""
    workers = [Part.worker(redis)] if sandboxed else [Part.echo(redis, ECHO_SLOTS) for _ in range(ECHO_WORKERS)]
    for worker in workers:
        stack.callback(worker.close)
    for worker in workers:
        worker.wait_ready()
        worker.kill(signal.SIGSTOP)
    gateway.wait_for_workers(0, FORGET_S)
    return workers


COLUMNS = (
    *("over", "workers", "in flight", "accepted in", "right results", "calls/s", "call p50", "p99", "second tenant p50"),
    *("p99", "gateway", "Redis", "CPU per call"),
)


def row(one: Burst) -> list[str]:
    return [
        one.transport,
        RUNS[one.sandboxed],
        f"{one.in_flight:,}",
        f"{one.accepted_in_s:.1f} s",
        f"{one.counts.right:,}",
        f"{one.calls_per_s:,.0f}",
        *(f"{percentile(one.calls_s, share):.2f} s" for share in (0.5, 0.99)),
        *(f"{percentile(one.second_ms, share):.0f} ms" for share in (0.5, 0.99)),
        f"{one.gateway_bytes / 1e6:.0f} MB",
        f"{one.redis_bytes / 1e6:.1f} MB",
        ", ".join(f"{name} {value:.2f} ms" for name, value in one.cpu_ms.items() if value),
    ]


def page(bursts: list[Burst], about: dict[str, str]) -> str:
    missed = [f"{one.transport} {RUNS[one.sandboxed]} {one.calls}: {words}" for one in bursts for words in one.misses()]
    verdict = f"**Missed**: {'; '.join(missed)}." if missed else "All met."
    wanted = f"gateway ≤ {GATEWAY_MOST_BYTES / 1e6:.0f} MB, Redis ≤ {REDIS_MOST_BYTES / 1e6:.0f} MB"
    head = f"# Bursts\n\nWanted: every result right, {wanted}, the second tenant's p99 ≤ {SECOND_P99_MS:.0f} ms. {verdict}"
    return f"{head}\n\n{markdown(COLUMNS, map(row, bursts), 2)}\n\n{results.about_table(about)}"


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.add_argument("--sizes", default="45000", help="calls in flight, with commas between them (default %(default)s)")
    parser.add_argument("--transports", type=some_of(TRANSPORTS), default=list(TRANSPORTS), help="of http,grpc (default: both)")
    parser.add_argument("--runs", type=some_of(RUNS), default=list(RUNS), help="of echo (no programs),sandbox (default: both)")
    parser.add_argument("--senders", type=int, default=SENDERS, help="processes that send (default %(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="calls in one request (default %(default)s)")
    given = parser.parse_args(argv)
    sizes = [int(word) for word in given.sizes.split(",")]
    about = results.about(MODULE, argv, server=redis_server.version())
    bursts = []
    for run, transport, size in itertools.product(given.runs, given.transports, sizes):
        print(f"burst: {size:,} calls over {transport}, {run} workers", file=sys.stderr, flush=True)
        sandboxed = run == "sandbox"
        bursts.append(burst(size, transport=transport, sandboxed=sandboxed, senders=given.senders, batch=given.batch))
    results.write_page(page(bursts, about), given.page)
    return EXIT_FAILED if any(one.misses() for one in bursts) else 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
