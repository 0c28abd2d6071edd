"""The same warning again and again is logged a few times, and then how many were left out."""

import itertools
import json
import logging
import subprocess
import sys
import time
from typing import Any

import pytest

PATIENCE_S = 120.0
_numbers = itertools.count()


@pytest.fixture
def log_limit() -> Any:
    from exec_service.telemetry import log_limit

    return log_limit


class Log:
    """A logger whose handler has the filter, and the lines that come through."""

    def __init__(self, limit: logging.Filter) -> None:
        self.lines: list[str] = []
        self.logger = logging.getLogger(f"repeated.{next(_numbers)}")
        self.logger.propagate = False
        self.logger.setLevel(logging.DEBUG)
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        handler.addFilter(limit)
        self.logger.addHandler(handler)


def wait_for_the_count(log: Log) -> str:
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        if told := [line for line in log.lines if line.startswith("left out")]:
            return told[0]
        time.sleep(0.02)
    pytest.fail("nobody says how many were left out")


def test_a_flood_of_one_message_is_cut_and_counted(log_limit: Any) -> None:
    now = [0.0]
    log = Log(log_limit.RepeatLimit(clock=lambda: now[0], window_s=0.05))
    for number in range(100):
        log.logger.error("again %d", number)
    assert log.lines == [f"again {number}" for number in range(log_limit.SAME_AT_MOST)]
    assert wait_for_the_count(log) == f"left out {100 - log_limit.SAME_AT_MOST} more messages like this: again %d"
    now[0] = 1.0
    log.logger.error("again %d", 100)
    assert log.lines[-1] == "again 100"


def test_other_messages_and_lines_of_requests_are_not_held_back(log_limit: Any) -> None:
    log = Log(log_limit.RepeatLimit())
    for number in range(1000):
        log.logger.warning("flood %d", number)
        log.logger.info("request %d", number)
    log.logger.warning("something else")
    assert "something else" in log.lines
    assert sum(line.startswith("request") for line in log.lines) == 1000


def test_texts_that_are_all_different_are_bounded_too(log_limit: Any) -> None:
    limit = log_limit.RepeatLimit(clock=lambda: 0.0, window_s=3600)
    log = Log(limit)
    for number in range(3 * log_limit.KINDS_AT_MOST):
        log.logger.warning(f"formatted before {number}")
    assert len(log.lines) <= log_limit.KINDS_AT_MOST + log_limit.SAME_AT_MOST
    assert len(limit._windows) <= log_limit.KINDS_AT_MOST + 1


def test_the_services_log_has_the_limit(log_limit: Any) -> None:
    code = f"""
import logging
from exec_service.telemetry.logs import start_logs
start_logs("warning", "json")
for number in range({10 * log_limit.SAME_AT_MOST}):
    logging.getLogger("worker").warning("the same %d", number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert sum(line["event"].startswith("the same") for line in lines) == log_limit.SAME_AT_MOST
