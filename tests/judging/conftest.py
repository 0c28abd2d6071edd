import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "worker"))

from judging_harness import Court, court  # noqa: E402
from sandbox_harness import need_sandbox  # noqa: E402


@pytest.fixture(scope="session")
async def here() -> AsyncIterator[Court]:
    need_sandbox()
    async with court("bare", "verify") as made:
        yield made
