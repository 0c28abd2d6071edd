"""A live service for the adapters: the one at EXEC_TEST_URL, or a new one."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def exec_url() -> Iterator[str]:
    if url := os.environ.get("EXEC_TEST_URL"):
        yield url
        return
    from service_harness import serving

    with serving() as service:
        yield service.url


@pytest.fixture(autouse=True)
def address(exec_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_roc.integrations import service

    monkeypatch.setenv("EXEC_URL", exec_url)
    monkeypatch.setattr(service, "_blocking", None)
