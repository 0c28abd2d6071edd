import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from cluster_harness import Cluster, cluster_on
from queue_harness import CLUSTER, ONE, SEVERAL, Bench, memory_bench, redis_bench
from redis_harness import MovedServer, chosen, server_params

from exec_wire.queue.urls import SLOTS
from loadtest.support.processes import free_port
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


@contextlib.contextmanager
def servers_on_demand(options: Callable[[], dict[str, str]]) -> Iterator[Callable[[str], MovedServer]]:
    with contextlib.ExitStack() as stack:
        servers: dict[str, MovedServer] = {}

        def at(path: str) -> MovedServer:
            if path not in servers:
                with chosen(path):
                    servers[path] = stack.enter_context(MovedServer(**options()))
            return servers[path]

        yield at


@pytest.fixture(scope="session")
def moved_server_at() -> Iterator[Callable[[str], MovedServer]]:
    """One of each program for all tests that leave it as it was; its clock can be moved."""
    with servers_on_demand(dict) as at:
        yield at


@pytest.fixture(scope="session")
def cluster_server_at() -> Iterator[Callable[[str], MovedServer]]:
    """As `moved_server_at`, each a cluster of one server with all slots: it refuses keys of several slots in one command."""
    with servers_on_demand(lambda: {"cluster_enabled": "yes", "cluster_port": str(free_port())}) as at:

        def with_slots(path: str) -> MovedServer:
            server = at(path)
            if "cluster_slots_assigned:0" in server.say("CLUSTER", "INFO"):
                assert server.say("CLUSTER", "ADDSLOTSRANGE", "0", str(SLOTS - 1)).startswith("+OK")
                while "cluster_state:ok" not in server.say("CLUSTER", "INFO"):
                    time.sleep(0.05)
            return server

        yield with_slots


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
QUEUES = [
    pytest.param((*param.values, kind), id=f"{param.id} {kind}") for kind in (SEVERAL, CLUSTER) for param in server_params()
]


@pytest.fixture(params=[pytest.param((MEMORY, ""), id="memory"), *server_params(), *QUEUES])
async def bench(
    request: pytest.FixtureRequest,
    moved_server_at: Callable[[str], MovedServer],
    cluster_server_at: Callable[[str], MovedServer],
) -> AsyncIterator[Bench]:
    path, kind = request.param if isinstance(request.param, tuple) else (request.param, ONE)
    if path == MEMORY:
        of_path = memory_bench()
    else:
        of_path = redis_bench((cluster_server_at if kind == CLUSTER else moved_server_at)(path), kind)
    async with of_path as bench:
        yield bench
