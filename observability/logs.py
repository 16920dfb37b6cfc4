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
_CONTROL = r"\x00-\x1f\x7f-\x9f"  # could forge lines, or command a terminal
CONTROL = re.compile(f"[{_CONTROL}]")
BARE_VALUE = re.compile(rf"[^\s\"=\\{_CONTROL}]+")  # needs no quotes in a text line
# gRPC writes each metadata value that is not UTF-8, with a traceback, whoever sends it.
GRPC_LOGGER, NOT_UTF8 = "grpc._cython.cygrpc", "Invalid encoding on %s"
_BARE_TYPES = frozenset({int, float, bool, type(None)})  # whose texts need none, either


def fields(**values: object) -> Mapping[str, Mapping[str, object]]:
    """Return the `extra` of a log call that carries these fields."""
    assert not RESERVED & values.keys(), f"{RESERVED & values.keys()} are parts of each line"
    return {ATTRIBUTE: values}


class TextFormatter(logging.Formatter):
    """`at level logger event key=value key="a value with spaces"`, one line per event.

    A quoted value is a JSON string. In an event, which may be another library's sentence, control
    characters are written as \\x0a. The lines of an exception follow the line of the event.
    """

    def format(self, record: logging.LogRecord) -> str:
        event = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.getMessage())
        words = [self.formatTime(record), record.levelname, record.name, event]
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
    logging.getLogger(GRPC_LOGGER).addFilter(_is_ours_to_know)


def _is_ours_to_know(record: logging.LogRecord) -> bool:
    return record.msg != NOT_UTF8


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, ATTRIBUTE, {})
    return found


def _text(value: object) -> str:
    text = str(value)
    if type(value) in _BARE_TYPES:
        return text
    return text if BARE_VALUE.fullmatch(text) else json.dumps(text)
