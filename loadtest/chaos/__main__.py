"""Kills, stops, empties and cuts off every part of a cluster under load, and counts lost calls: `make chaos`.

Four clusters of real processes on this machine, each with two gateways and three workers: one with sandboxes, the others with
workers that only echo after a pause, which serve many more calls for all that concerns the queue. The third has three Redis
servers as one queue, the fourth a Redis Cluster of three primaries and three replicas, the others one server. Each fault is
injected into a running load (`loadtest.support.steady_load`). It is over when it is undone, a kill at once; from then on new
calls are sent to every gateway until each is answered within a second: then the cluster is healthy again.

The seed chooses victims and moments. Killed processes are replaced before the next fault.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from loadtest.chaos.cluster import PATIENCE_S, Cluster
from loadtest.chaos.faults import CLUSTERED, ECHOED, SANDBOXED, SHARDED, Fault
from loadtest.support import redis_server, results
from loadtest.support.processes import exit_on_sigterm
from loadtest.support.results import EXIT_FAILED
from loadtest.support.steady_load import Counts, SteadyLoad, add_up

MODULE = "loadtest.chaos"
HEALTHY_WITHIN_S = 5.0
SHARDS = 3


class Outcome(NamedTuple):
    fault: str
    counts: Counts
    started_again: int  # an upper bound: a job that was delivered before may not have been started
    late: int
    published_again: int
    healthy_after_s: float
    calls_per_s: float
    misses: list[str]  # of `Cluster.probe_workers`

    @property
    def good(self) -> bool:
        return self.counts.holds and self.healthy_after_s <= HEALTHY_WITHIN_S and not self.misses


def run_fault(cluster: Cluster, name: str, fault: Fault, calls: int, seed: int) -> Outcome:
    """The load makes `calls` calls at least, about a third of them before the fault."""
    began, before = time.monotonic(), cluster.counters()
    load = SteadyLoad(lambda: cluster.urls, cluster.program, seed, name=f"load-{seed}")
    with load:
        wait_until(lambda: load.counts.right >= calls * cluster.chance.uniform(0.25, 0.4), name, load)
        others = fault(cluster) or []
        over = time.monotonic()
        cluster.wait_until_healthy()
        healthy_after_s = time.monotonic() - over
        wait_until(lambda: load.counts.right >= calls, name, load)
    took_s = time.monotonic() - began
    cluster.replace_removed()
    grown = cluster.counters()
    grown.subtract(before)
    counts = add_up([load.counts, *(other.counts for other in others)])
    return Outcome(
        name,
        counts,
        grown["taken_again"] + grown["started_again"],
        grown["late"],
        grown["published_again"],
        round(healthy_after_s, 2),
        round(counts.right / took_s, 1),
        cluster.probe_workers(),
    )


def wait_until(true: Callable[[], bool], name: str, load: SteadyLoad) -> None:
    give_up = time.monotonic() + PATIENCE_S
    seen = -1
    while not true():
        if load.counts.right != seen:
            seen, give_up = load.counts.right, time.monotonic() + PATIENCE_S
        if time.monotonic() > give_up:
            raise RuntimeError(f"{name}: no call was answered for {PATIENCE_S} s: {load.counts}")
        time.sleep(0.02)


COLUMNS: dict[str, Callable[[Outcome], object]] = {
    "accepted": lambda one: one.counts.accepted,
    "answered": lambda one: one.counts.answered,
    "connection broke": lambda one: one.counts.broken,
    "sent again": lambda one: one.counts.sent_again,
    "refused": lambda one: one.counts.refused,
    "published again": lambda one: one.published_again,
    "started twice": lambda one: one.started_again,
    "late answers dropped": lambda one: one.late,
    "blamed on infra": lambda one: one.counts.infra,
    "blamed on the model": lambda one: one.counts.model,
    "wrong": lambda one: one.counts.wrong + one.counts.twice,
    "lost": lambda one: one.counts.lost,
    "healthy after": lambda one: f"{one.healthy_after_s:.1f} s",
    "calls/s": lambda one: f"{one.calls_per_s:.0f}",
    "": lambda one: "good" if one.good else "**BAD**",
}


def page(outcomes: Sequence[Outcome], about: dict[str, str]) -> str:
    bad = [one.fault for one in outcomes if not one.good]
    counts = add_up(one.counts for one in outcomes)
    verdict = f"Bad: {', '.join(bad)}." if bad else "The promise held every time."
    rows = [[one.fault, *(str(value(one)) for value in COLUMNS.values())] for one in outcomes]
    return results.fill_page(
        __file__,
        summary=f"{counts.accepted} accepted calls, {counts.lost} lost. {verdict}",
        table=results.markdown(["fault", *COLUMNS], rows),
        healthy=HEALTHY_WITHIN_S,
        about=results.about_table(about),
    )


def run(names: Sequence[str], calls: int, sandboxed_calls: int, seed: int) -> Iterator[Outcome]:
    kinds: tuple[tuple[dict[str, Fault], dict[str, Any]], ...] = (
        (SANDBOXED, {"sandbox": True}),
        (ECHOED, {}),
        (SHARDED, {"shards": SHARDS}),
        (CLUSTERED, {"shards": SHARDS, "redis_cluster": True}),
    )
    for known, kind in kinds:
        wanted = {name: fault for name, fault in known.items() if name in names}
        if not wanted:
            continue
        with Cluster(seed=seed, **kind) as cluster:
            for number, (name, fault) in enumerate(wanted.items()):
                yield run_fault(cluster, name, fault, sandboxed_calls if cluster.sandbox else calls, seed + number)


def main(argv: list[str] | None = None) -> int:
    parser = results.parser(MODULE, __doc__, page=True)
    parser.epilog = redis_server.CHOICE
    parser.add_argument("--only", metavar="WORDS", default="", help="faults with these words in their names")
    parser.add_argument("--calls", type=int, default=5000, help="at least, for each fault (default %(default)s)")
    parser.add_argument("--sandboxed-calls", type=int, default=2000, help="at least, with sandboxes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    names = [name for name in (*SANDBOXED, *ECHOED, *SHARDED, *CLUSTERED) if given.only in name]
    about = results.about(MODULE, argv, server=redis_server.version())
    outcomes = []
    for outcome in run(names, given.calls, given.sandboxed_calls, given.seed):
        outcomes.append(outcome)
        print(f"chaos: {outcome.fault}: {'good' if outcome.good else 'BAD'} {outcome}", file=sys.stderr, flush=True)
    results.write_page(page(outcomes, about), given.page)
    return 0 if outcomes and all(one.good for one in outcomes) else EXIT_FAILED


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
