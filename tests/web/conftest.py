from collections.abc import Iterator
from typing import Any

import pytest
from service_harness import Service, serving
from web_harness import browsing


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for longer: while playwright is there its event loop is, and tests that bring their own cannot run."""
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving() as service:
        yield service
