import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "worker"), str(TESTS / "service")]  # a real service, and what it needs of the machine

from sandbox_harness import need_sandbox  # noqa: E402
from service_harness import Service, serving  # noqa: E402
from web_harness import browsing  # noqa: E402


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for longer: while playwright is there its event loop is, and tests that bring their own cannot run."""
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_sandbox()
    with serving() as service:
        yield service
