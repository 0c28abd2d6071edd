from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_harness import MovedServer, need_redis


@pytest.fixture(scope="session")
def moved_server() -> Iterator[MovedServer]:
    """One for all tests that leave it empty."""
    need_redis()
    with MovedServer() as server:
        yield server
