"""The body of a request: read within limits of size and time, and parsed as strict JSON."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.types import Receive

from http_gateway.config import GatewayConfig
from http_gateway.errors import ClientLeft, HttpError

# Parsing a value delays all streams, by less than a tenth of a microsecond.
MAX_VALUES = 1_000_000
MAX_DIGITS = 4300  # of an integer; Python reads no more
MIB = 2**20
_SEPARATORS = (b",", b"[", b"{")


async def read_json(
    headers: Mapping[bytes, bytes], receive: Receive, limits: GatewayConfig
) -> dict[str, Any]:
    """Return the JSON object that a request carries.

    Args:
        headers: The headers of the request, names in lower case.
        receive: ASGI's.
        limits: The limits of the gateway.

    Raises:
        HttpError: The body is missing, too large, too slow, or not a JSON object; names the fault.
        ClientLeft: The client left before the end of the body.
    """
    _check_type(headers)
    max_bytes = limits.max_body_mib * MIB
    if int(headers.get(b"content-length", b"0")) > max_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            body = await _read(receive, max_bytes, limits)
    except TimeoutError:
        message = f"no whole body within {limits.body_timeout_s:g} s"
        raise HttpError(408, message, code="request_timeout") from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object by RFC 8259, without repeated keys; raises HttpError otherwise."""
    if not body.strip():
        raise _no_json("it is empty")
    if sum(map(body.count, _SEPARATORS)) > MAX_VALUES:
        raise _no_json(f"it has more than {MAX_VALUES} values")
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} in line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        raise _no_json(str(error)) from None
    if not isinstance(value, dict):
        raise _no_json("it must be an object")
    return value


async def _read(receive: Receive, max_bytes: int, limits: GatewayConfig) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(body)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    # Requiring JSON also keeps web pages of other origins from sending requests unasked.
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        found = repr(kind[:60].decode("latin-1")) if kind else "none"
        message = f"content-type: found {found}; allowed: 'application/json'"
        raise HttpError(415, message, param="content-type", code="unsupported_media_type")
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity":
        found = repr(coding[:60].decode("latin-1"))
        message = f"content-encoding: found {found}; allowed: none, a body that is not compressed"
        raise HttpError(415, message, param="content-encoding", code="unsupported_media_type")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {name[:60]!r} is given twice in an object")
    return values


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _too_large(limits: GatewayConfig) -> HttpError:
    message = f"the body takes more than {limits.max_body_mib} MiB"
    return HttpError(413, message, code="request_too_large")


def _no_json(reason: str) -> HttpError:
    return HttpError(400, f"the body is not a JSON object: {reason}", code="invalid_json")
