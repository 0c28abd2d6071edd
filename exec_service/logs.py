"""Structured logs: one JSON object per line. What callers submit is never logged."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from exec_service.log_limit import RepeatLimit

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """Whatever a log call passes as `extra` becomes a field."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def log_json_lines(stream: TextIO, level: int = logging.INFO) -> None:
    """For the process's entry point: send all logs to `stream` in this form."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # uvicorn says at INFO what `up` says in its own words.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
