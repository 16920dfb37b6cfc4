"""Shows values in errors: as Python writes them, or as JSON does for callers of an HTTP gateway."""

import json
import math
import reprlib
from contextvars import ContextVar

MAX_SHOWN_CHARS = 60
# Whether the caller wrote JSON. An HTTP gateway sets it in the context of each request.
writes_json: ContextVar[bool] = ContextVar("writes_json", default=False)

_KINDS = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


def shown(value: object) -> str:
    """Return a value as an error shows it, truncated if it is long; a text stands in quotes."""
    if isinstance(value, str | bytes):
        value = value[: MAX_SHOWN_CHARS + 1]
    elif isinstance(value, list | tuple | set | dict):
        # cut in each level, whatever its size and depth
        return _JSON.repr(value) if writes_json.get() else reprlib.repr(value)
    elif writes_json.get() and isinstance(value, bool | float | None):
        return _JSON.repr(value)
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a value too long to show"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def shown_with_type(value: object) -> str:
    """Return a value of a wrong type as an error shows it."""
    if value is None:
        return shown(value)
    kind = type(value).__name__
    if writes_json.get():
        kind = _KINDS.get(type(value), kind)
    return f"{shown(value)} ({kind})"


class _JsonRepr(reprlib.Repr):
    """Cuts values as reprlib does, and writes them as JSON."""

    def repr_bool(self, value: bool, _: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, _: None, __: int) -> str:  # noqa: N802 - reprlib's name
        return "null"

    def repr_str(self, value: str, _: int) -> str:
        cut = value[: self.maxstring]
        return json.dumps(cut if cut == value else cut + "...")

    def repr_float(self, value: float, _: int) -> str:
        if math.isinf(value):  # 1e999
            return "Infinity" if value > 0 else "-Infinity"
        return repr(value)


_JSON = _JsonRepr()
