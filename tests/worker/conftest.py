from collections.abc import AsyncIterator

import pytest
from sandbox_harness import Lab, laboratory


@pytest.fixture(scope="session")
async def lab() -> AsyncIterator[Lab]:
    """One pool for all tests that leave it as it was."""
    async with laboratory(("bare", "numpy")) as lab:
        yield lab


@pytest.fixture
async def own_lab() -> AsyncIterator[Lab]:
    """A pool of the test's own, to be broken."""
    async with laboratory() as lab:
        yield lab
