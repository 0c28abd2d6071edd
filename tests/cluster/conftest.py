import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from cluster_harness import Cluster, cluster_on
from queue_harness import Bench, memory_bench, redis_bench
from redis_harness import MovedServer, chosen, server_params

from loadtest.support.redis_server import RedisServer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "one_server: tests what does not depend on the server, so it runs on one of those that are there"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever needs a server runs once on each that is there: they differ in what they answer."""
    if "redis_path" in metafunc.fixturenames:
        params = server_params()
        one = metafunc.definition.get_closest_marker("one_server") is not None
        metafunc.parametrize("redis_path", params[:1] if one else params, indirect=True)


@pytest.fixture
def redis_path(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


@pytest.fixture(scope="session")
def moved_server_at() -> Iterator[Callable[[str], MovedServer]]:
    """One of each program for all tests that leave it as it was; its clock can be moved."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, MovedServer] = {}

        def at(path: str) -> MovedServer:
            if path not in servers:
                with chosen(path):
                    servers[path] = stack.enter_context(MovedServer())
            return servers[path]

        yield at


@pytest.fixture
def moved_server(moved_server_at: Callable[[str], MovedServer], redis_path: str) -> MovedServer:
    return moved_server_at(redis_path)


@pytest.fixture
def own_server(redis_path: str) -> Iterator[RedisServer]:
    """A server of the test's own, to be broken."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def cluster(moved_server: MovedServer) -> AsyncIterator[Cluster]:
    moved_server.say("FLUSHALL")
    async with cluster_on(moved_server.url) as cluster:
        yield cluster


MEMORY = "in memory"


@pytest.fixture(params=[pytest.param(MEMORY, id="memory"), *server_params()])
async def bench(request: pytest.FixtureRequest, moved_server_at: Callable[[str], MovedServer]) -> AsyncIterator[Bench]:
    path: str = request.param
    async with memory_bench() if path == MEMORY else redis_bench(moved_server_at(path)) as bench:
        yield bench
