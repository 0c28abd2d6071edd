"""The two formats of a log line, JSON and text. Both carry the same fields."""

import logging
from datetime import UTC, datetime

import msgspec

MOST_CHARS = 16 << 10  # of one field
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_ESCAPES = {number: f"\\x{number:02x}" for number in (*range(32), 127)} | {10: "\\n", 9: "\\t"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Time, level, logger and event, then everything that the log call passed as `extra`."""
    line: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    line |= {name: value for name, value in vars(record).items() if name not in STANDARD_FIELDS}
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return {name: _shortened(value) if isinstance(value, str) else value for name, value in line.items()}


def _shortened(value: str) -> str:
    text = value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return _encode(_fields(record)).decode()


class TextLines(logging.Formatter):
    """Time, level, logger, event, then name=value. Only a traceback adds lines, which are indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record)
        traceback = str(line.pop("traceback", ""))
        time, level, logger, event = (str(line.pop(name)) for name in ("time", "level", "logger", "event"))
        extra = "".join(f" {name}={_quoted(value)}" for name, value in line.items())
        text = f"{time} {level:<7} {logger}: {event.translate(_ESCAPES)}{extra}"
        return text + "".join(f"\n    {part}" for part in traceback.splitlines())


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else _encode(value).decode()
    plain = text.isprintable() and not any(mark in text for mark in " \"'=")
    return text if plain and text else _encode(text).decode()


FORMATS: dict[str, type[logging.Formatter]] = {"json": JsonLines, "text": TextLines}
