from collections.abc import Iterator
from typing import Any

import pytest
from sandbox_harness import need_sandbox
from service_harness import Service, serving
from web_harness import browsing


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
