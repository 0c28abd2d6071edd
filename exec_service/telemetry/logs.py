"""Log lines of a process: one format, on standard error, written without blocking the caller.

`start_logs` is for a process's entry point. From then on everything on standard error is a line of the same format: log calls,
warnings, uncaught exceptions, and output of other code to the descriptor itself (the C part of gRPC, the runner and its jails).
Programs, their input and API keys are never logged.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import sys
import threading
from typing import TYPE_CHECKING

from exec_service.telemetry.log_format import FORMATS, TextLines
from exec_service.telemetry.log_limit import RepeatLimit
from exec_service.telemetry.log_writer import LEVELS, LogWriter, StderrReader

if TYPE_CHECKING:
    from exec_service.api.middleware import RequestFacts
    from exec_wire.messages.calls import Result

requests = logging.getLogger("exec_service.requests")
results = logging.getLogger("exec_service.results")
_own = logging.getLogger("exec_service.telemetry.logs")
_writer: LogWriter | None = None


def start_logs(level: str, format: str) -> None:
    """Call once, at the entry point of the process."""
    global _writer
    reader = StderrReader()
    writer = _writer = LogWriter(reader.real_fd, FORMATS[format]())
    writer.addFilter(RepeatLimit())
    logging.basicConfig(level=LEVELS[level], handlers=[writer], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _own.critical("unhandled error", exc_info=(kind, error, trace))
    threading.excepthook = _log_failed_thread
    # uvicorn repeats at INFO what we log, and httpx logs every request of a jobs worker.
    for name in ("uvicorn", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))
    if faulthandler.is_enabled():  # in a crash no thread of ours runs any more
        faulthandler.enable(reader.real_fd)
    reader.start()
    atexit.register(writer.flush)
    atexit.register(reader.stop)  # runs first


def _log_failed_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    _own.error("a thread failed", exc_info=error, extra={"thread_name": args.thread.name if args.thread else ""})


def real_stderr() -> int:
    """The descriptor that lines are written to: for children that write lines of their own."""
    return _writer.fd if _writer is not None else 2


def dropped_lines() -> int:
    """Since the start of the process."""
    return _writer.dropped if _writer is not None else 0


def say(text: str, level: int = logging.INFO) -> None:
    """Tell the person who started this process, at every log level. With the JSON format it is a log line."""
    if _writer is None:
        print(text, file=sys.stderr, flush=True)
    elif isinstance(_writer.formatter, TextLines):
        _writer.put(text)
    else:
        record = {"name": "exec_service", "levelno": level, "levelname": logging.getLevelName(level), "msg": text.strip()}
        _writer.emit(logging.makeLogRecord(record))


def log_request(level: int, facts: RequestFacts, duration_s: float, **fields: str | int) -> None:
    """One line per finished request: method, route, status, calls, body_bytes and, if it was refused, the problem code."""
    origin = facts.origin
    fields |= {"code": facts.code, "calls": facts.calls, "body_bytes": facts.body_bytes}
    fields |= {"request_id": origin.request_id, "traceparent": origin.traceparent}
    fields["tenant"] = origin.account.tenant if origin.account is not None else ""
    given = {name: value for name, value in fields.items() if value}
    requests.log(level, "request", extra=given | {"duration_ms": round(duration_s * 1000, 3)})


def log_infra(result: Result, tenant: str) -> None:
    """One line per result whose blame is `infra`."""
    names = ("status", "signal", "worker", "request_id", "index")
    fields = {name: getattr(result, name) for name in names} | {"reason": result.error, "tenant": tenant}
    results.warning(
        "the service failed to run a call", extra={name: value for name, value in fields.items() if value not in ("", None)}
    )
