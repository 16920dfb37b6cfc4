"""Checks JSON Schemas of clients, and turns each into a rule of a grammar. Pure."""

import json
from typing import Any

from grammars.errors import InvalidConstraint

MAX_DEPTH = 64  # of values within values
MAX_DIGITS = 4300  # of an integer: as many as Python reads
# Between the parts of a JSON text. Without a limit, a model may write blanks forever.
WHITESPACE = r"[ \t\n\r]{0,40}"
_OPTIONS = "x-guidance"  # key of a whole schema whose value changes the library's rules
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
MAX_SHOWN_CHARS = 150


def read_json(text: str, allowed: str) -> Any:
    """Read a client's JSON text.

    Args:
        text: The JSON.
        allowed: Its expected content, for errors.

    Raises:
        InvalidConstraint: It is not JSON, or nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_integer)
    except RecursionError:
        raise InvalidConstraint("values nested too deeply", f"{MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidConstraint(f"a text that is not JSON: {error}", allowed) from None
    _check_depth(value)
    return value


def kind_of(value: Any) -> str:
    """Return what a value of JSON is, for errors."""
    return _KINDS[type(value)]


def shown(value: Any) -> str:
    """Return a value of JSON as an error shows it, truncated if it is long."""
    return (repr(value) if isinstance(value, str) else json.dumps(value))[:MAX_SHOWN_CHARS]


def check_schema(schema: Any) -> dict[str, Any] | bool:
    """Return a schema if it looks like one.

    Raises:
        InvalidConstraint: It is neither an object nor a boolean, or sets options of the library.
    """
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint(kind_of(schema), "a JSON schema, which is an object")
    if isinstance(schema, dict) and _OPTIONS in schema:
        raise InvalidConstraint(f"the key {_OPTIONS!r}", "keywords of JSON Schema")
    return schema


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Return the part of a rule that matches JSON texts of a schema."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = {**schema, _OPTIONS: {"whitespace_pattern": WHITESPACE}}
    return f"%json {json.dumps(schema)}"


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [each for value in level for each in _items(value)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidConstraint("values nested too deeply", f"at most {MAX_DEPTH} levels")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
