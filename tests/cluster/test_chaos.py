"""Some of `make chaos`, with fewer calls: parts die under load, and every accepted call has its one right result."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from redis_harness import need_redis

from loadtest import chaos

SOME_ECHOED = ["kill -9 a worker", "kill -9 a gateway"]
SOME_SANDBOXED = ["kill -9 every zygote", "kill -9 every nsjail"]


@pytest.fixture(scope="module")
def echoing() -> Iterator[chaos.Cluster]:
    need_redis()
    with chaos.Cluster(sandbox=False, seed=7) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sandboxed() -> Iterator[chaos.Cluster]:
    need_redis()
    if os.geteuid() != 0:
        pytest.skip("what is killed here belongs to root")
    with chaos.Cluster(sandbox=True, seed=7) as cluster:
        yield cluster


def check(outcome: chaos.Outcome) -> None:
    books = outcome.books
    assert books.holds, books
    assert books.accepted == books.answered + books.broken
    assert outcome.well_after_s <= chaos.WELL_WITHIN_S, outcome
    assert outcome.misses == [], outcome


@pytest.mark.parametrize("trouble", SOME_ECHOED)
def test_nothing_is_lost(echoing: chaos.Cluster, trouble: str) -> None:
    check(chaos.meet(echoing, trouble, chaos.ECHOED[trouble], 1500, seed=7))


@pytest.mark.parametrize("trouble", SOME_SANDBOXED)
def test_no_program_is_blamed_for_what_happened_to_its_sandbox(sandboxed: chaos.Cluster, trouble: str) -> None:
    check(chaos.meet(sandboxed, trouble, chaos.SANDBOXED[trouble], 150, seed=7))
