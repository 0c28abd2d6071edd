"""Standard error of the process: a thread writes the log lines, another turns foreign output into log lines.

The caller of a log function never waits for the reader of standard error. Lines wait in a queue; lines beyond `MOST_BYTES` are
dropped and counted, and a log line reports the count when standard error is read again.
"""

import contextlib
import logging
import os
import select
import sys
import threading
from collections import deque
from typing import Any

import msgspec

from exec_service.telemetry.log_format import STANDARD_FIELDS

MOST_BYTES = 4 << 20  # of lines that wait to be written
WRITE_BYTES = 64 << 10
FLUSH_S = 2.0  # when the process ends
LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
DROPPED = {
    "name": "exec_service.telemetry.logs",
    "levelno": logging.WARNING,
    "levelname": "WARNING",
    "msg": "log lines were dropped: standard error was not read fast enough",
}
_stderr = logging.getLogger("stderr")


class LogWriter(logging.Handler):
    """Formats in the caller's thread; a thread of its own writes to the descriptor."""

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0  # lines, since the start
        self.fd, self._reported = fd, 0
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of the queue and of the write in progress
        self._changed = threading.Condition()
        threading.Thread(target=self._write_forever, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self.put(line)

    def put(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(data) > MOST_BYTES:
                self.dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every line is written, at most `FLUSH_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, FLUSH_S)

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                batch, count = bytearray(), 0
                while self._lines and len(batch) < WRITE_BYTES:
                    batch += self._lines.popleft()
                    count += 1
            written = self._write(batch)
            with self._changed:
                self.dropped += 0 if written else count
                self._bytes -= len(batch)
                self._changed.notify_all()
                dropped, self._reported = self.dropped - self._reported, self.dropped
            if written and dropped:
                self._write(self.format(logging.makeLogRecord(DROPPED | {"dropped": dropped})).encode() + b"\n")

    def _write(self, data: bytes | bytearray) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                select.select([], [self.fd], [])
            except OSError:  # the reader closed it
                return False
        return True


class StderrReader:
    """Replaces standard error by a pipe: everything written to descriptor 2 becomes log lines."""

    def __init__(self) -> None:
        self.real_fd = os.dup(2)
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        self._end = f"end of standard error {os.urandom(16).hex()}".encode()
        self._thread = threading.Thread(target=self._read_forever, name="stderr", daemon=True)

    def start(self) -> None:
        sys.stderr.flush()
        os.dup2(self._write_fd, 2)
        self._thread.start()

    def stop(self) -> None:
        """Log everything that was written so far, then restore the real standard error."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(self.real_fd, 2)
        os.set_blocking(self._write_fd, False)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\n" + self._end + b"\n")
            self._thread.join(FLUSH_S)

    def _read_forever(self) -> None:
        rest = b""
        while chunk := os.read(self._read_fd, WRITE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > WRITE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line == self._end:
                    return
                if line.strip():
                    _log_foreign(line.decode(errors="replace").rstrip())


def _log_foreign(line: str) -> None:
    """Log a line of another part of the process. The runner already writes our JSON format. Never raises: if the reading
    thread ended, everyone who writes to standard error would block."""
    try:
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
            logger, level, event = logging.getLogger(found.pop("logger")), LEVELS[found.pop("level")], found.pop("event")
            found.pop("time", None)
            extra = {name: value for name, value in found.items() if name not in STANDARD_FIELDS}
        except (msgspec.DecodeError, KeyError, TypeError):
            logger, level, event, extra = _stderr, logging.WARNING, line, {}
        logger.log(level, "%s", event, extra=extra)
    except Exception:
        _stderr.warning("a line of standard error could not be read", exc_info=True)
