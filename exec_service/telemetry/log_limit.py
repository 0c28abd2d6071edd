"""Bounds how often the same warning or error is logged, and says how many were left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SAME_AT_MOST, WINDOW_S = 20, 10.0  # of one message, whatever is filled in
KINDS_AT_MOST = 1000  # of messages that are told apart


class _Window:
    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.passed, self.left_out = ends_at, 0, 0


class RepeatLimit(logging.Filter):
    """For a handler. Below WARNING nothing is limited: a line per request is wanted.

    Messages are the same if their logger, level and text before formatting are; errors with a traceback also by its type.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._clock, self._window_s = clock, window_s
        self._windows: dict[tuple[object, ...], _Window] = {}
        self._lock = threading.RLock()  # what the garbage collector finalises meanwhile may log

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, str(record.msg)[:200], kind)
        with self._lock:
            window = self._window_of(key)
            window.passed += 1
            if window.passed <= SAME_AT_MOST:
                return True
            window.left_out += 1
            is_first = window.left_out == 1
        if is_first:
            with suppress(RuntimeError):  # no thread can be had now
                self._tell_later(record.name, record.levelno, window, str(record.msg)[:200])
        return False

    def _window_of(self, key: tuple[object, ...]) -> _Window:
        now = self._clock()
        window = self._windows.get(key)
        if window is None and len(self._windows) >= KINDS_AT_MOST:
            self._windows = {known: window for known, window in self._windows.items() if window.ends_at > now}
            if len(self._windows) >= KINDS_AT_MOST:  # text that was formatted before it was logged: one kind
                key = key[:2]
                window = self._windows.get(key)
        if window is None or window.ends_at <= now:
            window = self._windows[key] = _Window(now + self._window_s)
        return window

    def _tell_later(self, logger: str, level: int, window: _Window, text: str) -> None:
        """At the end of the window, whether or not anything more is logged."""

        def tell() -> None:
            logging.getLogger(logger).log(level, "left out %d more messages like this: %s", window.left_out, text)

        timer = threading.Timer(self._window_s, tell)
        timer.daemon = True
        timer.start()
