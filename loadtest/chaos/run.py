"""What dies, stops, forgets or is cut off under load, and whether the promise holds: `make chaos`.

Two clusters of real processes on this machine, each with two gateways, three workers and a Redis of its own: one with
sandboxes, one with workers that run nothing but take their time (many more calls, for all that concerns the queue). Each
trouble meets a running load (`loadtest.steady_load`). It is over when it is undone, or at once if it is a death; from then on
fresh calls are sent to every gateway until each has answered one within a second: then the cluster is well again.

Victims and moments are chosen by the seed. What was killed is replaced before the next trouble.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from loadtest import facts, meter, redis_server
from loadtest.moved_clock import MovedServer
from loadtest.parts import Part
from loadtest.proxy import ProxyThread
from loadtest.steady_load import Books, Program, SteadyLoad, together

WELL_WITHIN_S = 5.0
PAST_LEASE_S = 8.0
AWAY_S = 3.0
PATIENCE_S = 60.0  # for what must happen before the trouble or after it
SLOW_BYTES = 200_000
SERVER_HZ = 10  # Redis' default; at 500 it uses 2 % of a core at rest
GATEWAY_SETTINGS = {"max_calls": 1000, "max_calls_per_request": 500, "write_stall_s": 4}
ECHO_SETTINGS = {"slots": 64, "echo_ms": 50}
SANDBOX_SETTINGS = {"slots": 2, "profiles": '{"bare": []}', "min_tier": "D"}
PROBES = 8  # of each program
PROBE_S = 300.0  # its deadline: on a busy machine an endless program that ran into it would be the machine's fault
KNOWN = {"print(1)": ("ok", "none"), "raise SystemExit(3)": ("error", "model"), "while True: pass": ("timeout", "model")}
COUNTED = {
    "late": "exec_late_answers_total",
    "published_again": "exec_republished_total",
    "taken_again": "exec_worker_taken_again_total",
    "started_again": "exec_worker_started_again_total",
}


class Cluster:
    """Two gateways, three workers, one Redis. One gateway and one worker reach it through a proxy that can be stalled."""

    def __init__(self, *, sandbox: bool, seed: int) -> None:
        self.chance = random.Random(seed)
        self.program = Program.python if sandbox else Program.echo
        self.redis, self.gateways, self.workers = MovedServer(SERVER_HZ), list[Part](), list[Part]()
        self.sandbox = sandbox
        self._stack = contextlib.ExitStack()
        self._counted: Counter[str] = Counter()  # by parts that are gone

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.redis)
            self.proxy = stack.enter_context(ProxyThread(self.redis.port))
            stack.callback(self._close_parts)
            urls = [self.redis.url, self.proxy.url]
            self.gateways = [self._gateway(url) for url in urls]
            self.workers = [self._worker(url) for url in [self.redis.url, *urls]]
            for part in (*self.gateways, *self.workers):
                part.wait_ready()
            self._stack = stack.pop_all()
        self.wait_for_workers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close_parts(self) -> None:
        parts = [*self.workers, *self.gateways]
        for part in parts:
            if part.alive:
                part.kill(signal.SIGCONT)
                part.kill(signal.SIGTERM)
        for part in parts:
            part.close()

    def _gateway(self, url: str) -> Part:
        return Part.gateway(url, **GATEWAY_SETTINGS)

    def _worker(self, url: str) -> Part:
        return Part.worker(url, **SANDBOX_SETTINGS) if self.sandbox else Part.echo(url, **ECHO_SETTINGS)

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def add_worker(self) -> None:
        self.workers.insert(0, self._worker(self.redis.url).__enter__())

    def add_gateway(self) -> None:
        self.gateways.insert(0, self._gateway(self.redis.url).__enter__())

    def remove(self, parts: list[Part], number: int) -> None:
        """A victim of chance, but not the one behind the proxy, which is last. By SIGKILL, or SIGTERM and it may finish."""
        part = self.chance.choice(parts[:-1])
        parts.remove(part)
        self._counted.update(counts_of(part))
        part.kill(number)
        part.wait()
        part.close()

    def inner(self, name: str) -> list[int]:
        """The processes of all workers whose command contains this."""
        pids = [pid for worker in self.workers for pid in meter.tree(worker.pid)]
        return [pid for pid in pids if name in command_of(pid)]

    def counts(self) -> Counter[str]:
        total = Counter(self._counted)
        for part in (*self.gateways, *self.workers):
            total.update(counts_of(part))
        return total

    def wait_for_workers(self) -> None:
        for gateway in self.gateways:
            gateway.wait_for_workers(len(self.workers), PATIENCE_S)


def counts_of(part: Part) -> dict[str, int]:
    metrics = part.metrics()
    return {name: int(metrics.get(metric, 0)) for name, metric in COUNTED.items()}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_all(pids: Sequence[int]) -> None:
    if not pids:
        raise RuntimeError("there is nothing to kill")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- troubles: each returns when it is over, with the loads that were part of it ----------------------------------------------

Trouble = Callable[[Cluster], list[SteadyLoad] | None]


def zygotes_die(cluster: Cluster) -> None:
    kill_all(cluster.inner("inside/zygote.py"))


def jails_die(cluster: Cluster) -> None:
    kill_all([pid for pid in cluster.inner("bin/nsjail") if "worker.sandbox" not in command_of(pid)])


def runners_die(cluster: Cluster) -> None:
    kill_all(cluster.inner("worker.sandbox.runner"))


def worker_dies(cluster: Cluster) -> None:
    cluster.remove(cluster.workers, signal.SIGKILL)


def gateway_dies(cluster: Cluster) -> None:
    cluster.remove(cluster.gateways, signal.SIGKILL)


def workers_come_and_go(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.add_worker()
        cluster.remove(cluster.workers, signal.SIGTERM)


def worker_stands_still(cluster: Cluster) -> None:
    worker = cluster.chance.choice(cluster.workers)
    worker.kill(signal.SIGSTOP)
    time.sleep(PAST_LEASE_S)
    worker.kill(signal.SIGCONT)


def server_restarts(cluster: Cluster) -> None:
    cluster.redis.stop()
    time.sleep(AWAY_S)
    cluster.redis.start()


def server_forgets(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.redis.say("FLUSHALL")
        time.sleep(0.3)


def server_is_full(cluster: Cluster) -> None:
    cluster.redis.say("CONFIG", "SET", "maxmemory", "1")
    time.sleep(AWAY_S)
    cluster.redis.say("CONFIG", "SET", "maxmemory", "0")


def server_is_silent(cluster: Cluster) -> None:
    os.kill(cluster.redis.pid, signal.SIGSTOP)
    time.sleep(PAST_LEASE_S)
    os.kill(cluster.redis.pid, signal.SIGCONT)


def half_is_cut_off(cluster: Cluster) -> None:
    cluster.proxy.stall()
    time.sleep(PAST_LEASE_S)
    cluster.proxy.go_on()


def clock_jumps(cluster: Cluster) -> None:
    for seconds in (3600, -7200, 3600):
        cluster.redis.clock.move(seconds)
        time.sleep(1.0)


def clients_are_slow(cluster: Cluster) -> list[SteadyLoad]:
    """Some read a little at a time; one reads nothing until the gateway has hung up."""
    stall_s = GATEWAY_SETTINGS["write_stall_s"] + 2.0
    large = lambda name: Program.echo(name.ljust(SLOW_BYTES, "x"))  # noqa: E731
    loads = [
        SteadyLoad(lambda: cluster.urls, large, 1, name="slow", callers=4, batch=50, most=200, read_pause_s=0.05),
        SteadyLoad(lambda: cluster.urls, large, 1, name="stalled", callers=1, batch=50, most=50, first_pause_s=stall_s),
    ]
    return run_all(loads)


def ten_times_too_much(cluster: Cluster) -> list[SteadyLoad]:
    most = 10 * GATEWAY_SETTINGS["max_calls"] * len(cluster.gateways)
    return run_all(
        [SteadyLoad(lambda: cluster.urls, cluster.program, 1, name="burst", callers=40, batch=most // 40, most=most)]
    )


def run_all(loads: list[SteadyLoad]) -> list[SteadyLoad]:
    with contextlib.ExitStack() as stack:
        for load in loads:
            stack.enter_context(load)
        for load in loads:
            load.join()
    return loads


SANDBOXED: dict[str, Trouble] = {
    "kill -9 every zygote": zygotes_die,
    "kill -9 every nsjail": jails_die,
    "kill -9 every runner": runners_die,
    "kill -9 a worker (sandboxed)": worker_dies,
    "kill -9 a gateway (sandboxed)": gateway_dies,
}
ECHOED: dict[str, Trouble] = {
    "kill -9 a worker": worker_dies,
    "kill -9 a gateway": gateway_dies,
    "workers join and leave": workers_come_and_go,
    f"SIGSTOP a worker for {PAST_LEASE_S:g} s": worker_stands_still,
    f"Redis gone for {AWAY_S:g} s, empty afterwards": server_restarts,
    "FLUSHALL, twice": server_forgets,
    f"Redis out of memory for {AWAY_S:g} s": server_is_full,
    f"Redis silent for {PAST_LEASE_S:g} s": server_is_silent,
    f"a gateway and a worker cut off for {PAST_LEASE_S:g} s": half_is_cut_off,
    "Redis' clock jumps by hours": clock_jumps,
    "slow and stalled clients": clients_are_slow,
    "10 x overload": ten_times_too_much,
}


# -- one trouble under load ---------------------------------------------------------------------------------------------------


class Outcome(Struct, frozen=True):
    trouble: str
    books: Books
    started_again: int  # at most: a job that was delivered before may not have been started there
    late: int
    published_again: int
    well_after_s: float
    calls_per_s: float
    took_s: float
    misses: list[str] = []  # of `look_at_workers`

    @property
    def good(self) -> bool:
        return self.books.holds and self.well_after_s <= WELL_WITHIN_S and not self.misses


def meet(cluster: Cluster, name: str, trouble: Trouble, calls: int, seed: int) -> Outcome:
    """The load makes `calls` calls at least, about a third of them before the trouble."""
    began, before = time.monotonic(), cluster.counts()
    load = SteadyLoad(lambda: cluster.urls, cluster.program, seed, name=f"load-{seed}")
    with load:
        wait_until(lambda: load.books.right >= calls * cluster.chance.uniform(0.25, 0.4), name, load)
        others = trouble(cluster) or []
        over = time.monotonic()
        wait_until_well(cluster.urls)
        well_after_s = time.monotonic() - over
        wait_until(lambda: load.books.right >= calls, name, load)
    took_s = time.monotonic() - began
    replace(cluster)
    grown = cluster.counts()
    grown.subtract(before)
    books = together([load.books, *(other.books for other in others)])
    return Outcome(
        name,
        books,
        grown["taken_again"] + grown["started_again"],
        grown["late"],
        grown["published_again"],
        round(well_after_s, 2),
        round(books.right / took_s, 1),
        round(took_s, 1),
        look_at_workers(cluster),
    )


def look_at_workers(cluster: Cluster) -> list[str]:
    """What is wrong when the trouble is over: workers that take no calls, programs with another verdict than their own."""
    known = KNOWN if cluster.sandbox else {"print(1)": ("ok", "none")}
    codes = [code for code in known for _ in range(PROBES)]
    calls = [{"code": code, "limits": {"wall_s": 0.3}, "tenant": "probe", "deadline_s": PROBE_S} for code in codes]
    seen: set[str] = set()
    wrong: Counter[str] = Counter()
    give_up = time.monotonic() + PATIENCE_S
    while len(seen) < len(cluster.workers) and time.monotonic() < give_up:
        results = ask(cluster.urls[0], "/v1/batch?stream=false", {"calls": calls}, PROBE_S) or {}
        for code, result in zip(codes, results.get("results", []), strict=False):
            seen.add(result["worker"])
            verdict = (result["status"], result["blame"])
            if verdict != known[code]:
                wrong[f"{code!r} ended as {verdict}"] += 1
    if len(seen) < len(cluster.workers):
        wrong[f"of {len(cluster.workers)} workers only {len(seen)} take calls"] += 1
    return list(wrong)


def replace(cluster: Cluster) -> None:
    while len(cluster.workers) < 3:
        cluster.add_worker()
    while len(cluster.gateways) < 2:
        cluster.add_gateway()
    cluster.wait_for_workers()


def wait_until(true: Callable[[], bool], name: str, load: SteadyLoad) -> None:
    give_up = time.monotonic() + PATIENCE_S
    seen = -1
    while not true():
        if load.books.right != seen:
            seen, give_up = load.books.right, time.monotonic() + PATIENCE_S
        if time.monotonic() > give_up:
            raise RuntimeError(f"{name}: nothing was answered for {PATIENCE_S} s: {load.books}")
        time.sleep(0.02)


def wait_until_well(urls: Sequence[str]) -> None:
    """Until a fresh call to every gateway has been answered within a second."""
    give_up = time.monotonic() + PATIENCE_S
    for url in urls:
        while not is_well(url) and time.monotonic() < give_up:
            time.sleep(0.05)


def is_well(url: str) -> bool:
    answer = ask(url, "/v1/run", {"code": "print(1)", "deadline_s": 5, "tenant": "probe"}, timeout_s=1.0)
    return answer is not None and answer.get("status") == "ok"


def ask(url: str, path: str, body: Any, timeout_s: float) -> dict[str, Any] | None:
    """The answer, or None if there is none in time."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", path, msgspec.json.encode(body), {"content-type": "application/json"})
        answer: dict[str, Any] = msgspec.json.decode(connection.getresponse().read())
        return answer
    return None


# -- report -------------------------------------------------------------------------------------------------------------------


class ChaosResults(Struct):
    started: str
    commit: str
    machine: dict[str, str]
    server: str
    seed: int
    took_s: float = 0.0
    outcomes: list[Outcome] = []


COLUMNS: dict[str, Callable[[Outcome], object]] = {
    "accepted": lambda one: one.books.accepted,
    "answered": lambda one: one.books.answered,
    "connection broke": lambda one: one.books.broken,
    "sent again": lambda one: one.books.sent_again,
    "refused": lambda one: one.books.refused,
    "published again": lambda one: one.published_again,
    "started twice": lambda one: one.started_again,
    "late answers dropped": lambda one: one.late,
    "our fault": lambda one: one.books.infra,
    "blamed on the model": lambda one: one.books.model,
    "wrong": lambda one: one.books.wrong + one.books.twice,
    "lost": lambda one: one.books.lost,
    "well after": lambda one: f"{one.well_after_s:.1f} s",
    "calls/s": lambda one: f"{one.calls_per_s:.0f}",
    "": lambda one: "good" if one.good else "**BAD**",
}


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [["trouble", *COLUMNS], ["---"] + ["---:"] * len(COLUMNS)]
    rows += [[one.trouble, *(str(value(one)) for value in COLUMNS.values())] for one in outcomes]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


PAGE = """# Chaos

{summary}

{table}

{columns}

| | |
| --- | --- |
{about}
"""
ABOUT_COLUMNS = """\
Two gateways, three workers and one Redis, all processes on this machine, for sandboxes (the first rows) and for
workers that run nothing but take 50 ms (`--runtime echo`). Each trouble meets a running load; calls have idempotency keys and
are sent again when a connection breaks. **accepted** and **answered** count every acceptance, so a call that was sent again
counts again: accepted = answered + connection broke + lost. **started twice** counts deliveries after the first, so it is an
upper bound. **our fault**: results with the blame `infra`, which are sent again. **well after**: from the end of the trouble
until a fresh call to every gateway was answered within a second; at most {well:g} s are good."""


def page(results: ChaosResults) -> str:
    bad = [one.trouble for one in results.outcomes if not one.good]
    lost = sum(one.books.lost for one in results.outcomes)
    accepted = sum(one.books.accepted for one in results.outcomes)
    summary = f"{accepted} accepted calls, {lost} lost. " + (
        f"Bad: {', '.join(bad)}." if bad else "The promise held every time."
    )
    about = {**results.machine, "server": results.server, "seed": results.seed, "commit": results.commit}
    about |= {"started": results.started, "took": f"{results.took_s:.0f} s"}
    return PAGE.format(
        summary=summary,
        table=table(results.outcomes),
        columns=ABOUT_COLUMNS.format(well=WELL_WITHIN_S),
        about="\n".join(f"| {name} | {value} |" for name, value in about.items()),
    )


def run(troubles: Sequence[str], calls: int, sandboxed_calls: int, seed: int) -> Iterator[Outcome]:
    """Those that are named, in the order of the tables above."""
    for known, sandbox, most in ((SANDBOXED, True, sandboxed_calls), (ECHOED, False, calls)):
        wanted = {name: trouble for name, trouble in known.items() if name in troubles}
        if not wanted:
            continue
        with Cluster(sandbox=sandbox, seed=seed) as cluster:
            for number, (name, trouble) in enumerate(wanted.items()):
                yield meet(cluster, name, trouble, most, seed + number)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="chaos",
        description=__doc__,
        epilog=redis_server.CHOICE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="WORDS", default="", help="troubles that have these words in their names")
    parser.add_argument("--calls", type=int, default=5000, help="at least, for each trouble (default 5000)")
    parser.add_argument("--sandboxed-calls", type=int, default=2000, help="where programs really run (default 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the results, and a page beside them")
    given = parser.parse_args(argv)
    names = [name for name in (*SANDBOXED, *ECHOED) if given.only in name]
    results = ChaosResults(facts.now(), facts.commit(), facts.machine(), redis_server.version(), given.seed, outcomes=[])
    began = time.monotonic()
    for outcome in run(names, given.calls, given.sandboxed_calls, given.seed):
        results.outcomes.append(outcome)
        print(f"{outcome.trouble}: {'good' if outcome.good else 'BAD'} {outcome}", file=sys.stderr, flush=True)
    results.took_s = round(time.monotonic() - began, 1)
    print(table(results.outcomes))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
        given.json.with_suffix(".md").write_text(page(results))
    return 0 if results.outcomes and all(one.good for one in results.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
