from collections.abc import AsyncIterator

import pytest
from judging_harness import Court, court
from sandbox_harness import need_sandbox


@pytest.fixture(scope="session")
async def here() -> AsyncIterator[Court]:
    need_sandbox()
    async with court("bare", "verify") as made:
        yield made
