"""The log: lines for people, or a JSON object a line; whatever a client sent, a record is one line."""

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
UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # what ends a line, or moves a terminal's cursor
OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
MOST_TEXT, MOST_FIELD, MOST_TRACE = 4000, 200, 20_000  # characters

log = logging.getLogger("quire.access")


def safe(text: str, most: int) -> str:
    """Control characters as they are written in Python, and the rest as it is, up to a length."""
    text = UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."


def field(value: Any) -> Any:
    """A value as JSON has it, and short."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 6)
    return safe(value if isinstance(value, str) else shown(value), MOST_FIELD)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was said beside the message; libraries mark with an underscore what they hang on every record (Ray does)."""
    found = record.__dict__.items()
    return {name: field(value) for name, value in found if name not in OWN and not name.startswith("_")}


class Plain(logging.Formatter):
    """Time, level and message; a traceback follows, indented so that no line of it looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {record.levelname:8} {safe(record.getMessage(), MOST_TEXT)}"
        if trace := trace_of(self, record):
            line += "".join(f"\n    {safe(part, MOST_TEXT)}" for part in trace.split("\n"))
        return line


class Json(logging.Formatter):
    """An object a line: time, level, logger, message, what else was said, and an exception as one field."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{stamp}.{int(record.created % 1 * 1000):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": safe(record.getMessage(), MOST_TEXT),
        }
        found = fields(record) | found
        if trace := trace_of(self, record):
            found["exception"] = trace
        return json_format.dumps(found)


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The last of a traceback: there is what happened."""
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(parts)[-MOST_TRACE:]


def setup_logging(json: bool, level: str, stream: TextIO | None = None) -> None:
    """One way out for all records, on stderr unless said otherwise; of other libraries warnings only."""
    if level.lower() not in LEVELS:
        raise ModelError(f"log_level is {level!r}; it can be {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json() if json else Plain())
    own = getattr(logging, level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(own, logging.WARNING))
    for name in ("quire", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(own if name == "quire" or own == logging.DEBUG else max(own, logging.WARNING))
    logging.getLogger("uvicorn.access").disabled = True  # access() knows more


def access(method: str, path: str, status: int, seconds: float, request_id: str, **facts: Any) -> None:
    """A request was answered: what it took in numbers and names, and never a word of it."""
    known = {"method": method, "path": path, "status": status, "seconds": seconds, "request_id": request_id}
    found = {name: field(value) for name, value in (facts | known).items() if value is not None and name not in OWN}
    rest = "".join(f" {name}={found[name]}" for name in facts if name in found and name not in known)
    log.info("%s %s %s %.3f s %s%s", *(found.get(name) for name in known), rest, extra=found)
