from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# The scripted worker and the served gateway are the same with any queue.
sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parents[1] / "worker"))  # for what needs a real sandbox

from cluster_harness import Cluster, cluster_on
from redis_harness import MovedServer, need_redis

from loadtest.redis_server import RedisServer


@pytest.fixture(scope="session")
def moved_server() -> Iterator[MovedServer]:
    """One for all tests that leave it as it was; its clock can be moved."""
    need_redis()
    with MovedServer() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server of the test's own, to be broken."""
    need_redis()
    with RedisServer() as server:
        yield server


@pytest.fixture
async def cluster(moved_server: MovedServer) -> AsyncIterator[Cluster]:
    moved_server.say("FLUSHALL")
    async with cluster_on(moved_server.url) as cluster:
        yield cluster
