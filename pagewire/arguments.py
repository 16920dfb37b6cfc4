"""Checks a caller's arguments before anything is sent. Pure, except for a token in the environment.

Ranges and messages are the router's, which checks again and also knows the model's limits. Each
refusal is an `InvalidRequestError` that names the field as the router does, what was found and
what is allowed; for options it names every wrong one.
"""

import json
import os
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from operator import index
from typing import Any, TypeGuard

from pagewire.errors import FieldViolation, InvalidRequestError
from pagewire.shown import MAX_SHOWN_CHARS, shown, shown_with_type

MAX_UINT32 = 2**32 - 1
MAX_SEED = 2**64 - 1
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_TIMEOUT_S = 30 * 24 * 3600  # gRPC treats much longer ones as none, or as expired
MAX_CONSTRAINT_CHOICES = 1000
NEAR = 0.8  # of difflib's ratio: two names of which one is a slip for the other

TOKEN_VARIABLE = "PAGEWIRE_TOKEN"  # noqa: S105 - a name
MAX_TOKEN_CHARS = 4000
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/=-]{{1,{MAX_TOKEN_CHARS}}}", re.ASCII)  # of RFC 6750

# A name or an IPv4 address, or an IPv6 address in brackets; then a port.
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+(?:%\w+)?\]):(\d{1,5})", re.ASCII)


def refused(field: str, found: str, allowed: str) -> InvalidRequestError:
    """Make the error for one wrong field."""
    description = f"found {found}; allowed: {allowed}"
    return InvalidRequestError(
        f"{field}: {description}",
        code="INVALID_ARGUMENT",
        violations=(FieldViolation(field=field, description=description),),
    )


def check_address(value: object, field: str = "address") -> str:
    """Return a router's address; it must be `host:port`."""
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or match is None or not 1 <= int(match[1]) <= 65535:
        raise refused(field, shown(value), "host:port, such as localhost:50051 or [::1]:50051")
    return value


def check_addresses(value: object) -> tuple[str, ...]:
    """Return the addresses of routers, at least one, from one address or a sequence."""
    if not isinstance(value, list | tuple):
        return (check_address(value),)
    if not value:
        raise refused("address", "an empty sequence", "host:port, or a sequence of them")
    return tuple(check_address(each, f"address[{i}]") for i, each in enumerate(value))


def check_token(value: object, field: str = "token") -> str:
    """Return a bearer token; empty: none. Errors do not show the token."""
    if not isinstance(value, str):
        raise refused(field, f"a value of type {type(value).__name__}", "a token, str")
    if value and not _TOKEN.fullmatch(value):
        found = f"{len(value)} characters, some of which a token cannot have"
        raise refused(field, found, f"1 to {MAX_TOKEN_CHARS} letters, digits and - . _ ~ + / =")
    return value


def given_token(value: object = None) -> str:
    """Return a token; for None, that of the environment variable PAGEWIRE_TOKEN, if any."""
    if value is None:
        return check_token(os.environ.get("PAGEWIRE_TOKEN", "").strip(), TOKEN_VARIABLE)
    return check_token(value)


def check_timeout_s(field: str, value: object) -> float:
    """Return a time limit in seconds."""
    if not _is_number(value):
        raise refused(field, shown_with_type(value), f"seconds, above 0, up to {MAX_TIMEOUT_S}")
    if not 0 < value <= MAX_TIMEOUT_S:
        raise refused(field, shown(value), f"seconds, above 0, up to {MAX_TIMEOUT_S}")
    return float(value)


def check_resume_s(value: object) -> float:
    """Return how long a lost stream looks for a router, in seconds."""
    if not _is_number(value) or not 0 <= value <= MAX_TIMEOUT_S:
        raise refused("resume_s", shown_with_type(value), f"seconds, 0 to {MAX_TIMEOUT_S}")
    return float(value)


def check_hedge_after_s(value: object) -> float:
    """Return when a second router gets a call that has received nothing, in seconds; 0: never."""
    if not _is_number(value) or not 0 <= value <= MAX_TIMEOUT_S:
        allowed = f"seconds, 0 to {MAX_TIMEOUT_S}"
        raise refused("hedge_after_s", shown_with_type(value), allowed)
    return float(value)


def check_text(field: str, value: object, *, empty: str | None = None) -> str:
    """Return a text that UTF-8 can encode.

    Args:
        field: Its name in the request.
        value: What the caller gave.
        empty: How the error describes an empty text; None allows it.
    """
    if not isinstance(value, str):
        raise refused(field, shown_with_type(value), "a text")
    if empty is not None and not value:
        raise refused(field, empty, "at least one character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"{shown(value[error.start])} at character {error.start}"
        raise refused(field, found, "text without lone surrogates") from None
    return value


def check_prompt_text(field: str, value: object) -> str:
    """Return a text to tokenize."""
    return check_text(field, value, empty="an empty text")


def check_token_ids(
    field: str, value: object, *, allowed: str = "a sequence of token ids"
) -> "array[int]":
    """Return token ids from any sequence of integers, including arrays; to pack them costs little.

    The array looks at their range in a fifth of the time of Python's own code.
    """
    items = check_items(field, value, allowed)
    if set(map(type, items)) <= {int}:
        with suppress(OverflowError):
            return array("I", items)
    return array(
        "I",
        (
            _integer(f"{field}[{i}]", token_id, low=0, high=MAX_UINT32)
            for i, token_id in enumerate(items)
        ),
    )


def check_flag(field: str, value: object) -> bool:
    """Return a switch; numbers are not accepted."""
    if not isinstance(value, bool):
        raise refused(field, shown_with_type(value), f"{shown(True)} or {shown(False)}")
    return value


def check_sampling(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that are set, with plain Python values; None counts as absent."""
    checked: dict[str, Any] = {}
    wrong: list[InvalidRequestError] = []
    for name, value in options.items():
        check = _OPTIONS.get(name)
        if check is None:
            is_form = name in _CONSTRAINTS
            hint = f" (did you mean constraint={{{name!r}: ...}}?)" if is_form else ""
            found = "an unknown option" + (hint or did_you_mean(name, _OPTIONS))
            wrong.append(refused(f"sampling.{name}", found, ", ".join(_OPTIONS)))
        elif value is not None:
            try:
                checked[name] = check(f"sampling.{name}", value)
            except InvalidRequestError as error:
                wrong.append(error)
    max_tokens = checked.get("max_tokens", MAX_UINT32)
    if checked.get("min_tokens", 0) > max_tokens:
        found = str(checked["min_tokens"])
        allowed = f"at most {max_tokens}, the most tokens that an answer may have here"
        wrong.append(refused("sampling.min_tokens", found, allowed))
    if wrong:
        raise _joined(wrong)
    return checked


def _joined(errors: Sequence[InvalidRequestError]) -> InvalidRequestError:
    """Return one error for several wrong fields, with a line for each."""
    return InvalidRequestError(
        "\n".join(error.message for error in errors),
        code=errors[0].code,
        violations=tuple(violation for error in errors for violation in error.violations),
    )


def _temperature(field: str, value: object) -> float:
    allowed = f"0 for greedy, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    return _number(
        field, value, lambda v: v == 0 or MIN_TEMPERATURE <= v <= MAX_TEMPERATURE, allowed
    )


def _top_p(field: str, value: object) -> float:
    return _number(field, value, lambda v: 0 < v <= 1, "above 0, up to 1")


def _between(low: float, high: float) -> Callable[[str, object], float]:
    return lambda field, value: _number(
        field, value, lambda v: low <= v <= high, f"{low:g} to {high:g}"
    )


def _number(field: str, value: object, allows: Callable[[float], bool], allowed: str) -> float:
    if not _is_number(value):
        raise refused(field, shown_with_type(value), f"a number, {allowed}")
    if not allows(value):
        raise refused(field, shown(value), allowed)
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _integer(field: str, value: object, *, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]  # includes integers of numpy and torch
    except (TypeError, ValueError):
        found = shown_with_type(value)
        raise refused(field, found, f"an integer, {low} to {high}") from None
    if not low <= number <= high:
        raise refused(field, shown(number), f"{low} to {high}")
    return number


def _stop(field: str, value: object) -> list[str]:
    strings = (
        [value] if isinstance(value, str) else check_items(field, value, "a sequence of texts")
    )
    if len(strings) > MAX_STOP_STRINGS:
        raise refused(field, f"{len(strings)} strings", f"at most {MAX_STOP_STRINGS}")
    for i, each in enumerate(strings):
        text = check_text(f"{field}[{i}]", each)
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            allowed = f"1 to {MAX_STOP_CHARS} characters"
            raise refused(f"{field}[{i}]", f"{len(text)} characters", allowed)
    return strings


def _stop_token_ids(field: str, value: object) -> list[int]:
    token_ids = check_token_ids(field, value)
    if len(token_ids) > MAX_STOP_TOKENS:
        raise refused(field, f"{len(token_ids)} ids", f"at most {MAX_STOP_TOKENS}")
    return token_ids.tolist()


def _constraint(field: str, value: object) -> dict[str, Any]:
    """Return the fields of a Constraint message."""
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in _CONSTRAINTS:
        found = shown_with_type(value)
        raise refused(field, found, f"a mapping with one of {', '.join(_CONSTRAINTS)}")
    [(kind, content)] = value.items()
    return {kind: _CONSTRAINTS[kind](f"{field}.{kind}", content)}


def _json(field: str, value: object, allowed: str) -> str:
    if isinstance(value, str):
        return check_text(field, value)
    if not isinstance(value, Mapping | bool):
        raise refused(field, shown_with_type(value), f"{allowed}, as a mapping or a text")
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(field, f"what JSON cannot express: {error}", allowed) from None


def _json_object(field: str, value: object) -> bool:
    if value is not True:
        raise refused(field, shown_with_type(value), shown(True))
    return True


def _choice(field: str, value: object) -> dict[str, list[str]]:
    texts = check_items(field, value, "a sequence of texts")
    if not 1 <= len(texts) <= MAX_CONSTRAINT_CHOICES:
        raise refused(field, f"{len(texts)} texts", f"1 to {MAX_CONSTRAINT_CHOICES}")
    return {
        "texts": [
            check_text(f"{field}[{i}]", t, empty="an empty text") for i, t in enumerate(texts)
        ]
    }


def check_items(field: str, value: object, allowed: str) -> list[Any]:
    """Return the items of any sized sequence other than a text or a mapping."""
    is_ordered = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_ordered or isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        raise refused(field, shown_with_type(value), allowed)
    try:
        return list(value)  # type: ignore[call-overload,no-any-return]
    except TypeError:  # an array without dimensions
        raise refused(field, shown_with_type(value), allowed) from None


def did_you_mean(name: object, names: Collection[str], prefix: str = "") -> str:
    """Return the hint that follows an unknown name; empty: no known name is near.

    Args:
        name: As the caller wrote it.
        names: The known ones.
        prefix: Stands before them in the error: "tools[0]."
    """
    import difflib  # only errors need it

    if not isinstance(name, str) or len(name) > MAX_SHOWN_CHARS:  # a long one would take long
        return ""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=NEAR)
    return f" (did you mean {prefix + near[0]!r}?)" if near else ""


# field of Constraint |-> its check
_CONSTRAINTS: dict[str, Callable[[str, object], Any]] = {
    "json_schema": partial(_json, allowed="a JSON schema"),
    "json_object": _json_object,
    "regex": check_text,
    "choice": _choice,
    "grammar": check_text,
    "tool_calls": partial(_json, allowed="calls as forced_calls describes them"),
}
# option |-> its check, in the order of SamplingOptions
_OPTIONS: dict[str, Callable[[str, object], Any]] = {
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": partial(_integer, low=0, high=MAX_UINT32),
    "min_p": _between(0, 1),
    "repetition_penalty": _between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "seed": partial(_integer, low=0, high=MAX_SEED),
    "max_tokens": partial(_integer, low=1, high=MAX_UINT32),
    "min_tokens": partial(_integer, low=0, high=MAX_UINT32),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": check_flag,
    "n": partial(_integer, low=1, high=MAX_CHOICES),
    "logprobs": partial(_integer, low=0, high=MAX_LOGPROBS),
    "skip_special_tokens": check_flag,
    "constraint": _constraint,
}
SAMPLING = frozenset(_OPTIONS)  # the names of all sampling options
