"""Logging in plain or JSON lines, with escaped text, so that a record is one line."""

import json as json_format
import logging
import math
import re
import sys
import time
from typing import Any, TextIO

from ...model.config import ModelError
from ..api.validation import shown

LEVELS = ("debug", "info", "warning", "error", "critical")
# Line ends and terminal control.
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
RECORD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}
MAX_TEXT = 4000  # characters
MAX_FIELD = 200
MAX_TRACE = 20_000

log = logging.getLogger("quire.access")


def escape(text: str, max_length: int) -> str:
    """Write control characters as Python escapes, and cut the text to `max_length` characters."""
    text = UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text[: max_length + 1])
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def loggable(value: Any) -> Any:
    """Convert a value to a short JSON scalar."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 6)
    return escape(value if isinstance(value, str) else shown(value), MAX_FIELD)


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """The `extra` fields of a record.

    Names with an underscore, which Ray adds to every record, are left out.
    """
    extras = record.__dict__.items()
    return {
        name: loggable(value)
        for name, value in extras
        if name not in RECORD_ATTRIBUTES and not name.startswith("_")
    }


class PlainFormatter(logging.Formatter):
    """Time, level and message.

    The lines of a traceback are indented, so that none looks like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname:8} {escape(record.getMessage(), MAX_TEXT)}"
        if trace := traceback_text(self, record):
            line += "".join(
                f"\n    {escape(trace_line, MAX_TEXT)}" for trace_line in trace.split("\n")
            )
        return line


class JsonFormatter(logging.Formatter):
    """A JSON object per record, with its `extra` fields and with the traceback as one field."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{stamp}.{int(record.created % 1 * 1000):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape(record.getMessage(), MAX_TEXT),
        }
        entry = extra_fields(record) | entry
        if trace := traceback_text(self, record):
            entry["exception"] = trace
        return json_format.dumps(entry)


def traceback_text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The last MAX_TRACE characters of a record's traceback, where the error is; "" without one."""
    sections = (
        [formatter.formatException(record.exc_info)]
        if record.exc_info and record.exc_info[0]
        else []
    )
    sections += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(sections)[-MAX_TRACE:]


def setup_logging(json: bool, level: str, stream: TextIO | None = None) -> None:
    """Install one handler, on stderr by default.

    Of other libraries only warnings and errors are logged.
    """
    if level.lower() not in LEVELS:
        raise ModelError(f"log_level is {level!r}; it can be {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else PlainFormatter())
    quire_level = getattr(logging, level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(quire_level, logging.WARNING))
    for name in ("quire", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(
            quire_level
            if name == "quire" or quire_level == logging.DEBUG
            else max(quire_level, logging.WARNING)
        )
    logging.getLogger("uvicorn.access").disabled = True  # `access` logs more


def access(
    method: str, path: str, status: int, seconds: float, request_id: str, **facts: Any
) -> None:
    """Log a finished request: numbers and names, never its text."""
    request_fields = {
        "method": method,
        "path": path,
        "status": status,
        "seconds": seconds,
        "request_id": request_id,
    }
    fields_to_log = {
        name: loggable(value)
        for name, value in (facts | request_fields).items()
        if value is not None and name not in RECORD_ATTRIBUTES
    }
    details = "".join(
        f" {name}={fields_to_log[name]}"
        for name in facts
        if name in fields_to_log and name not in request_fields
    )
    log.info(
        "%s %s %s %.3f s %s%s",
        *(fields_to_log.get(name) for name in request_fields),
        details,
        extra=fields_to_log,
    )
