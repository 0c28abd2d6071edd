import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

HERE = Path(__file__).parent
for neighbour in ("gateway", "judging", "worker"):
    sys.path.append(str(HERE.parent / neighbour))

from compat_harness import Visitor  # noqa: E402
from judging_harness import court  # noqa: E402
from sandbox_harness import need_sandbox  # noqa: E402


@pytest.fixture(scope="session")
async def here() -> AsyncIterator[Visitor]:
    """A gateway with a real sandbox, seen by a client that knows nothing of us."""
    need_sandbox()
    async with (
        court("bare", "data", "verify", codejudge_wall_s=2.0) as made,
        httpx.AsyncClient(base_url=made.url, timeout=60) as http,
    ):
        yield Visitor(http, made.gateway)
