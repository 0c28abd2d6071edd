from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The machine seen from outside is the same for a worker and for a whole service.
sys.path.append(str(HERE.parent / "worker"))

from sandbox_harness import need_sandbox  # noqa: E402
from service_harness import Service, serving  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes (or EXEC_SLOW=1)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; only with --slow or EXEC_SLOW=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow", False) or os.environ.get("EXEC_SLOW") == "1":
        return
    slow = [item for item in items if item.path.is_relative_to(HERE) and item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """One for all tests that leave it as it was."""
    need_sandbox()
    with serving(profiles='{"bare": [], "numpy": ["numpy"]}') as service:
        yield service


@pytest.fixture(autouse=True)
def sandbox() -> None:
    need_sandbox()
