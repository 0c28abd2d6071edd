from collections.abc import AsyncIterator

import pytest
from sandbox_harness import Lab, laboratory, need_sandbox


@pytest.fixture(scope="session")
async def lab() -> AsyncIterator[Lab]:
    """One pool for all tests that leave it as it was."""
    need_sandbox()
    async with laboratory(("bare", "numpy")) as lab:
        yield lab


@pytest.fixture
async def own_lab() -> AsyncIterator[Lab]:
    """A pool of the test's own, to be broken."""
    need_sandbox()
    async with laboratory() as lab:
        yield lab
