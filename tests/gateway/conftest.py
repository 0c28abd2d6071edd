from collections.abc import AsyncIterator

import pytest
from gateway_harness import Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running() as service:
        yield service


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Service]:
    """One for a whole file of tests that leave nothing behind: a server takes a fifth of a second to stop."""
    async with running() as service:
        yield service
