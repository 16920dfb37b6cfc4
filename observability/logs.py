"""Log lines of all processes: an event name and fields, as text or JSON, on standard error.

Code logs with the standard library, `log.info("request_done request_id=%s pages=%d", ...)`; this
file alone decides how a line looks.
"""

import json
import logging
import sys
import time

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: at, level, logger, event, and the message's key=value fields."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = split_fields(record.getMessage())
        line = {
            "at": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def split_fields(message: str) -> tuple[str, dict[str, str]]:
    """Split `event key=value key=value`; words without a sign stay part of the event."""
    words, fields = [], {}
    for word in message.split(" "):
        key, sign, value = word.partition("=")
        if sign and key.isidentifier():
            fields[key] = value
        else:
            words.append(word)
    return " ".join(words), fields


def configure_logging(level: str, line_format: str) -> None:
    """Set up the process's root logger; call it once, first thing.

    Args:
        level: "debug", "info", "warning" or "error".
        line_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter() if line_format == "json" else logging.Formatter(TEXT_FORMAT)
    formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
    formatter.default_msec_format = "%s.%03dZ"
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
