"""Log lines of all processes: an event name and fields, as text or JSON, on standard error.

Code logs with the standard library and passes the fields as values:
`log.info("request_done", extra=fields(request_id=request_id, pages=3))`; this file alone formats
lines.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

ATTRIBUTE = "fields"  # of a log record
RESERVED = frozenset({"at", "level", "logger", "event", "exception"})
BARE_VALUE = re.compile(r"[^\s\"=\\]+")  # needs no quotes in a text line
_BARE_TYPES = frozenset({int, float, bool, type(None)})  # whose texts need none, either


def fields(**values: object) -> Mapping[str, Mapping[str, object]]:
    """Return the `extra` of a log call that carries these fields."""
    assert not RESERVED & values.keys(), f"{RESERVED & values.keys()} are parts of each line"
    return {ATTRIBUTE: values}


class TextFormatter(logging.Formatter):
    """`at level logger event key=value key="a value with spaces"`, one line per event.

    A quoted value is a JSON string. The lines of an exception follow the line of the event.
    """

    def format(self, record: logging.LogRecord) -> str:
        words = [self.formatTime(record), record.levelname, record.name, record.getMessage()]
        words += [f"{name}={_text(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: at, level, logger, event, the fields, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(level: str, line_format: str) -> None:
    """Set up the process's root logger; call it once, first thing.

    Args:
        level: "debug", "info", "warning" or "error".
        line_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter() if line_format == "json" else TextFormatter()
    formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
    formatter.default_msec_format = "%s.%03dZ"
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, ATTRIBUTE, {})
    return found


def _text(value: object) -> str:
    text = str(value)
    if type(value) in _BARE_TYPES:
        return text
    return text if BARE_VALUE.fullmatch(text) else json.dumps(text)
