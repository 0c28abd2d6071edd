"""Some of `make chaos`, with fewer calls: parts die under load, and every accepted call has its one right result."""

import os
from collections.abc import Iterator

import pytest
from redis_harness import need_redis

from loadtest.chaos import __main__ as chaos
from loadtest.chaos.cluster import Cluster
from loadtest.chaos.faults import ECHOED, SANDBOXED, SHARDED

SOME_ECHOED = ["kill -9 a worker", "kill -9 a gateway"]
SOME_SHARDED = ["FLUSHALL of one of three servers, twice", "a gateway and a worker cut off from one of three servers for 8 s"]
SOME_SANDBOXED = ["kill -9 every zygote", "kill -9 every nsjail"]


@pytest.fixture(scope="module")
def echoing() -> Iterator[Cluster]:
    need_redis()
    with Cluster(sandbox=False, seed=7) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def of_three_servers() -> Iterator[Cluster]:
    need_redis()
    with Cluster(sandbox=False, seed=7, shards=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[Cluster]:
    need_redis()
    if os.geteuid() != 0:
        pytest.skip("what is killed here belongs to root")
    with Cluster(sandbox=True, seed=7) as cluster:
        yield cluster


def check(outcome: chaos.Outcome) -> None:
    counts = outcome.counts
    assert counts.holds, counts
    assert counts.accepted == counts.answered + counts.broken
    assert outcome.healthy_after_s <= chaos.HEALTHY_WITHIN_S, outcome
    assert outcome.misses == [], outcome


@pytest.mark.parametrize("fault", SOME_ECHOED)
def test_nothing_is_lost(echoing: Cluster, fault: str) -> None:
    check(chaos.run_fault(echoing, fault, ECHOED[fault], 1500, seed=7))


@pytest.mark.parametrize("fault", SOME_SHARDED)
def test_nothing_is_lost_with_one_of_three_servers(of_three_servers: Cluster, fault: str) -> None:
    check(chaos.run_fault(of_three_servers, fault, SHARDED[fault], 1500, seed=7))


@pytest.mark.parametrize("fault", SOME_SANDBOXED)
def test_no_program_is_blamed_for_what_happened_to_its_sandbox(sandboxed: Cluster, fault: str) -> None:
    check(chaos.run_fault(sandboxed, fault, SANDBOXED[fault], 150, seed=7))
