from collections.abc import AsyncIterator

import pytest
from judging_harness import Court, court


@pytest.fixture(scope="session")
async def here() -> AsyncIterator[Court]:
    async with court("bare", "verify") as made:
        yield made
