"""Log lines: one format for the whole process, written by a thread, so that nobody who logs waits for who reads.

`start_logs` is for a process's entry point. From then on everything that reaches standard error is a line of the same format:
what Python code logs, warnings, exceptions that nobody caught, and what others write to the descriptor itself (the C part of
gRPC, the runner and its jails). Lines wait in a bounded queue while standard error is stalled; beyond `MOST_BYTES` they are
dropped, counted (`dropped`) and reported in a line when it moves again. What callers submit is never logged, nor is a key.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from exec_service.telemetry.log_limit import RepeatLimit

if TYPE_CHECKING:
    from exec_service.dispatch.requests import Origin
    from exec_wire.messages.calls import Result

MOST_BYTES = 4 << 20  # of lines that wait to be written
MOST_CHARS = 16 << 10  # of one field
WRITE_BYTES = 64 << 10
FLUSH_S = 2.0  # at the end of the process, for what waits
LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_encode = msgspec.json.Encoder(enc_hook=str).encode

requests = logging.getLogger("exec_service.requests")
results = logging.getLogger("exec_service.results")
_stderr = logging.getLogger("stderr")
_own = logging.getLogger("exec_service.telemetry.logs")


# -- what is logged of a request and of a result ---------------------------------------------------------------------------


def log_request(
    level: int,
    *,
    method: str,
    route: str,
    status: int | str,
    duration_s: float,
    origin: Origin,
    code: str,
    calls: int,
    body_bytes: int = 0,
) -> None:
    """One line for a request that is over; `code` is of the problem, if it was refused."""
    if not requests.isEnabledFor(level):
        return
    facts = {
        "method": method,
        "route": route,
        "status": status,
        "duration_ms": round(duration_s * 1000, 3),
        "request_id": origin.request_id,
        "tenant": origin.account.tenant if origin.account is not None else "",
        "calls": calls,
        "code": code,
        "body_bytes": body_bytes,
        "traceparent": origin.traceparent,
    }
    requests.log(level, "request", extra={name: value for name, value in facts.items() if value})


def log_infra(result: Result, tenant: str) -> None:
    """A result that is our fault: the reason, and where to look."""
    facts = {
        "status": result.status,
        "reason": result.error,
        "signal": result.signal,
        "worker": result.worker,
        "request_id": result.request_id,
        "index": result.index,
        "tenant": tenant,
    }
    given = {name: value for name, value in facts.items() if value not in ("", None)}
    results.warning("a call failed for a reason of ours", extra=given)


# -- the two formats ------------------------------------------------------------------------------------------------------


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Whatever a log call passes as `extra`, and a name for each of the usual parts."""
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return {name: _shortened(value) for name, value in line.items()}


def _shortened(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return _encode(_fields(record)).decode()


class TextLines(logging.Formatter):
    """Time, level, logger, event, then name=value. Only a traceback has lines of its own, which are indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record)
        traceback = str(line.pop("traceback", ""))
        time, level, logger, event = (str(line.pop(name)) for name in ("time", "level", "logger", "event"))
        words = [
            time,
            f"{level:<7}",
            f"{logger}:",
            event.translate(_ONE_LINE),
            *(f"{name}={_word(v)}" for name, v in line.items()),
        ]
        return " ".join(words) + "".join(f"\n    {part}" for part in traceback.splitlines())


_ONE_LINE = {number: f"\\x{number:02x}" for number in (*range(32), 127)} | {10: "\\n", 9: "\\t"}


def _word(value: object) -> str:
    text = value if isinstance(value, str) else _encode(value).decode()
    plain = text.isprintable() and not any(mark in text for mark in " \"'=")
    return text if plain and text else _encode(text).decode()


FORMATS: dict[str, type[logging.Formatter]] = {"json": JsonLines, "text": TextLines}


# -- writing --------------------------------------------------------------------------------------------------------------


class LogWriter(logging.Handler):
    """Formats where it is called; a thread of its own writes to the descriptor."""

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0  # lines, since the start
        self._fd, self._reported = fd, 0
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of these, and of what is being written
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
        """Wait until everything is written, but never for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes, FLUSH_S)

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                portion, count = bytearray(), 0
                while self._lines and len(portion) < WRITE_BYTES:
                    portion += self._lines.popleft()
                    count += 1
            written = self._write(portion)
            with self._changed:
                self.dropped += 0 if written else count
                self._bytes -= len(portion)
                self._changed.notify_all()
                news, self._reported = self.dropped - self._reported, self.dropped
            if written and news:
                words = "log lines were dropped: standard error was not read fast enough"
                facts = {"name": _own.name, "levelno": logging.WARNING, "levelname": "WARNING", "msg": words, "dropped": news}
                self._write(self.format(logging.makeLogRecord(facts)).encode() + b"\n")

    def _write(self, data: bytes | bytearray) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # whoever shares the descriptor has made it so
                select.select([], [self._fd], [])
            except OSError:
                return False  # nobody reads it any more
        return True


class StderrReader:
    """Takes the place of standard error: what is written to the descriptor becomes log lines."""

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
        """Give standard error back, when all that was written is a log line."""
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
                    self._log(line.decode(errors="replace").rstrip())

    def _log(self, line: str) -> None:
        try:
            log_foreign(line)
        except Exception:  # whoever writes to standard error would wait for ever if this thread ended
            _stderr.warning("a line that could not be read", exc_info=True)


def log_foreign(line: str) -> None:
    """What another part of the process wrote to standard error; the runner writes our own format already."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
        logger, level, event = logging.getLogger(found.pop("logger")), LEVELS[found.pop("level")], found.pop("event")
        found.pop("time", None)
        extra = {name: value for name, value in found.items() if name not in _PLAIN}
    except (msgspec.DecodeError, KeyError, TypeError):
        logger, level, event, extra = _stderr, logging.WARNING, line, {}
    logger.log(level, "%s", event, extra=extra)


# -- the life of it -------------------------------------------------------------------------------------------------------

_writer: LogWriter | None = None


def start_logs(level: str, format: str) -> None:
    """For the process's entry point, once: all that goes to standard error is a log line from now on."""
    global _writer
    reader = StderrReader()
    _writer = LogWriter(reader.real_fd, FORMATS[format]())
    _writer.addFilter(RepeatLimit())
    logging.basicConfig(level=LEVELS[level], handlers=[_writer], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _own.critical("unhandled error", exc_info=(kind, error, trace))
    threading.excepthook = _log_failed_thread
    # uvicorn says at INFO what we say in our own words, and httpx logs every request of a jobs worker.
    for name in ("uvicorn", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))
    if faulthandler.is_enabled():  # a crash leaves no time for threads
        faulthandler.enable(reader.real_fd)
    reader.start()
    atexit.register(_stop, reader, _writer)


def _log_failed_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    _own.error("a thread failed", exc_info=error, extra={"thread_name": args.thread.name if args.thread else ""})


def _stop(reader: StderrReader, writer: LogWriter) -> None:
    reader.stop()
    writer.flush()


def dropped_lines() -> int:
    """Since the start of the process."""
    return _writer.dropped if _writer is not None else 0


def say(words: str, level: int = logging.INFO) -> None:
    """To the person who started this process: also shown where warnings are not. In JSON a line like any other."""
    if _writer is None:
        print(words, file=sys.stderr, flush=True)
    elif isinstance(_writer.formatter, TextLines):
        _writer.put(words)
    else:
        record = {"name": "exec_service", "levelno": level, "levelname": logging.getLevelName(level), "msg": words.strip()}
        _writer.emit(logging.makeLogRecord(record))
