"""A live service for the adapters: the one at EXEC_TEST_URL, or a new one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "worker"), str(HERE.parent / "service"), str(HERE.parents[1])]


@pytest.fixture(scope="session")
def exec_url() -> Iterator[str]:
    if url := os.environ.get("EXEC_TEST_URL"):
        yield url
        return
    from sandbox_harness import need_sandbox
    from service_harness import serving

    need_sandbox()
    with serving() as service:
        yield service.url


@pytest.fixture(autouse=True)
def address(exec_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_roc.integrations import service

    monkeypatch.setenv("EXEC_URL", exec_url)
    monkeypatch.setattr(service, "_blocking", None)
