import functools
from collections.abc import AsyncIterator, Iterator

import common
import pytest

from exec_client import AsyncClient, Policy

from .scripted_server import ScriptedServer

# The shape of the defaults, with pauses that suit a test.
QUICK = Policy(backoff_s=0.01, max_backoff_s=0.05, grace_s=0.2)


@pytest.fixture(scope="session")
def running_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(running_server: ScriptedServer) -> ScriptedServer:
    running_server.play()
    return running_server


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, policy=QUICK) as client:
        yield client


until = functools.partial(common.until, every_s=0.002)
