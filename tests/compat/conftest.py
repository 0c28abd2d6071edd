from collections.abc import AsyncIterator

import httpx
import pytest
from compat_harness import Visitor
from judging_harness import court


@pytest.fixture(scope="session")
async def here() -> AsyncIterator[Visitor]:
    """A gateway with a real sandbox, seen by a client that knows nothing of us."""
    async with (
        court("bare", "data", "verify", codejudge_wall_s=2.0) as made,
        httpx.AsyncClient(base_url=made.url, timeout=60) as http,
    ):
        yield Visitor(http, made.gateway)
