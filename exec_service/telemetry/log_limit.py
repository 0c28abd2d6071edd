"""Limits how often the same warning or error is logged, and logs how many were left out."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SAME_AT_MOST, WINDOW_S = 20, 10.0  # of one message template
KINDS_AT_MOST = 1000  # templates that are counted separately


class _Window:
    def __init__(self, ends_at: float) -> None:
        self.ends_at, self.passed, self.left_out = ends_at, 0, 0


class RepeatLimit(logging.Filter):
    """A filter for a handler. Records below WARNING are not limited: one line per request is wanted.

    Two records are the same if logger, level, message template and the type of their exception are the same.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._clock, self._window_s = clock, window_s
        self._windows: dict[tuple[object, ...], _Window] = {}
        self._lock = threading.RLock()  # a finalizer may log while this thread holds the lock

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
            timer = threading.Timer(self._window_s, self._report, (*key[:3], window))  # whether or not more is logged
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started now
                timer.start()
        return False

    def _window_of(self, key: tuple[object, ...]) -> _Window:
        now = self._clock()
        window = self._windows.get(key)
        if window is None and len(self._windows) >= KINDS_AT_MOST:
            self._windows = {known: window for known, window in self._windows.items() if window.ends_at > now}
            if len(self._windows) >= KINDS_AT_MOST:  # text that was formatted before it was logged: count as one kind
                key = key[:2]
                window = self._windows.get(key)
        if window is None or window.ends_at <= now:
            window = self._windows[key] = _Window(now + self._window_s)
        return window

    def _report(self, logger: str, level: int, text: str, window: _Window) -> None:
        logging.getLogger(logger).log(level, "left out %d more messages like this: %s", window.left_out, text)
