"""The body of a request: read within limits of size and time, and parsed as strict JSON."""

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from starlette.types import Receive

from grammars.json_schema import kind_of
from http_gateway.body_room import MIB, SMALL_BYTES, BodyPlace, BodyRoom
from http_gateway.config import GatewayConfig
from http_gateway.errors import ClientLeft, HttpError

T = TypeVar("T")

ROOM_BODIES = 16  # of the largest size, and their clients may all be slow
MAX_THREADS = 2  # the event loop competes with them for the interpreter
# Values that the parser makes without running Python keep the event loop waiting: a million texts
# for some 70 ms, as many arrays for ten times that.
MAX_VALUES = 1_000_000  # token ids of one prompt of the longest context, or of many prompts
MAX_ARRAYS = 100_000
MAX_OBJECTS = 100_000  # ten for each message that a router takes
MAX_DIGITS = 4300  # of an integer; Python reads no more
_SEPARATORS = (b",", b"[", b"{")


class JsonBody(NamedTuple):
    """The JSON object of a request."""

    value: dict[str, Any]
    num_bytes: int  # of its text


class Bodies:
    """The bodies of all requests to a gateway; large ones are parsed outside the event loop.

    Args:
        limits: The gateway's.
    """

    def __init__(self, limits: GatewayConfig) -> None:
        self._limits = limits
        self._room = BodyRoom(ROOM_BODIES * limits.max_body_mib * MIB)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="large-body")

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive, tenant: str) -> JsonBody:
        """Return the JSON object that a request carries.

        Args:
            headers: The headers of the request, names in lower case.
            receive: ASGI's.
            tenant: Who sends it; empty: callers are not distinguished.

        Raises:
            HttpError: The body is missing, too large, too slow, or not a JSON object, or there is
                no room for it; names the fault.
            ClientLeft: The client left before the end of the body.
        """
        _check_type(headers)
        # The parser takes any number of zeros before a length, int() no more than MAX_DIGITS.
        length = headers.get(b"content-length", b"").lstrip(b"0") or b"0"
        if int(length) > self._limits.max_body_mib * MIB:
            raise _too_large(self._limits)
        with self._room.place(tenant) as place:
            try:
                async with asyncio.timeout(self._limits.body_timeout_s):
                    body = await _read(receive, place, self._limits)
            except TimeoutError:
                message = f"no whole body within {self._limits.body_timeout_s:g} s"
                raise HttpError(408, message, code="request_timeout") from None
            value = await self.work(partial(parse_object, body), len(body))
            return JsonBody(value, len(body))

    async def work(self, function: Callable[[], T], num_bytes: int) -> T:
        """Return the result of a function that works on a body of this size.

        If that is large, the function runs in a thread, and waits while MAX_THREADS run. A
        cancelled caller gives up its place in the queue; a running function ends by itself.
        """
        if num_bytes <= SMALL_BYTES:
            return function()
        running = partial(copy_context().run, function)
        return await asyncio.get_running_loop().run_in_executor(self._threads, running)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object by RFC 8259, without repeated keys; raises HttpError otherwise."""
    if not body.strip():
        raise _no_json("it is empty")
    if body.startswith(BOM_UTF8):
        raise _no_json("it begins with a byte order mark")
    if sum(map(body.count, _SEPARATORS)) > MAX_VALUES:
        raise _no_json(f"it has more than {MAX_VALUES} values")
    if body.count(b"[") > MAX_ARRAYS:
        raise _no_json(f"it has more than {MAX_ARRAYS} arrays")
    num_objects = 0

    def count_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_objects
        num_objects += 1
        if num_objects > MAX_OBJECTS:
            raise ValueError(f"it has more than {MAX_OBJECTS} objects")
        return _object(pairs)

    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=count_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_real,
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
        raise _no_json(f"it is {kind_of(value)}")
    return value


async def _read(receive: Receive, place: BodyPlace, limits: GatewayConfig) -> bytearray:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limits.max_body_mib * MIB:
            raise _too_large(limits)
        place.hold(len(body))
        if not message.get("more_body", False):
            return body


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


def _real(digits: str) -> float:
    return float(digits)  # in Python, so that other threads get a turn


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _too_large(limits: GatewayConfig) -> HttpError:
    message = f"the body takes more than {limits.max_body_mib} MiB"
    return HttpError(413, message, code="request_too_large")


def _no_json(reason: str) -> HttpError:
    return HttpError(400, f"the body is not a JSON object: {reason}", code="invalid_json")
