import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The machine seen from outside is the same for a worker and for a whole service.
sys.path.append(str(HERE.parent / "worker"))

from sandbox_harness import need_sandbox  # noqa: E402
from service_harness import Service, serving  # noqa: E402


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """One for all tests that leave it as it was."""
    need_sandbox()
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}') as service:
        yield service


@pytest.fixture(autouse=True)
def sandbox() -> None:
    need_sandbox()
