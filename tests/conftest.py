import os
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The harness of a folder serves others too.
sys.path += [str(HERE), *(str(HERE / folder) for folder in ("cluster", "gateway", "judging", "service", "web", "worker"))]
# The suite starts hundreds of interpreters: each module of this tree is compiled once, not once in each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Files of more than a minute. With xdist they start first, so that none of them runs on while the other processes are idle.
LONG = (
    "cluster/test_processes.py",
    "hostile/test_corpus.py",
    "cluster/test_redis_unavailable.py",
    "service/test_service_cli.py",
    "worker/test_time_and_blame.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes (or EXEC_SLOW=1)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; only with --slow or EXEC_SLOW=1")
    config.addinivalue_line("markers", "vm: also run under other kernels by `make test-vm`; minutes in all")
    config.addinivalue_line("markers", "alone: looks at the whole machine; no other test runs at the same time")
    # Taken out of the environment: a service that a test starts refuses variables that it does not know.
    if (folder := os.environ.pop("EXEC_SUPPORT_RECORD", "")) and not hasattr(config, "workerinput"):
        from support_record import SupportRecord

        config.pluginmanager.register(SupportRecord(folder))
    config.option.loadscopereorder = False  # xdist's own order knows only the number of tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow") and os.environ.get("EXEC_SLOW") != "1":
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (not str(item.path).endswith(LONG), -tests[item.path]))
