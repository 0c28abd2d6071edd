from collections.abc import Iterator

import pytest
from sandbox_harness import need_sandbox
from service_harness import Service, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """One for all tests that leave it as it was."""
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}') as service:
        yield service


@pytest.fixture(autouse=True)
def sandbox() -> None:
    need_sandbox()
