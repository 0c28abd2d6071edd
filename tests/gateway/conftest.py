from collections.abc import AsyncIterator

import pytest
from gateway_harness import Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running() as service:
        yield service
