"""Limits of messages between the processes of a cluster: a proven peer may still be broken.

How much a field may hold is an option of the field, in the contract itself (`most` in
common.proto). Servers check requests so, and callers check answers, before anything keeps them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.protos.common_pb2 import most, most_each
from protos.call_guard import CallGuard
from protos.field_count import check_num_fields

# Of a message with all nested ones; to count so many takes a third of a second. What needs most are
# tokens with log probabilities that waited for a slow router: five fields each.
MAX_PEER_FIELDS = 500_000
# Parts of streams that others share. Whoever reads one checks it, and refuses that request alone.
CHECKED_ALONE = frozenset({"pagewire.v1.SubmitRequest", "pagewire.v1.PrefillStart"})
_LEAST_BYTES = 2  # of a field: its tag, and its value or its length
_NO_EXCESS = 2**31  # bytes; no message is so long
_UNITS: dict[type, str] = {str: "characters", bytes: "bytes"}  # others have items


def peer_guard(max_calls: int) -> CallGuard:
    """Return the guard of a server that only processes of the cluster call.

    Args:
        max_calls: Most open calls of one method.
    """
    return CallGuard(max_calls=max_calls, max_fields=MAX_PEER_FIELDS, check=check_limits)


def parse_checked(raw: bytes, descriptor: Any, parse: Callable[[bytes], Any]) -> Any:
    """Parse a message of a peer and check it.

    Args:
        raw: The serialized message.
        descriptor: The descriptor of its type.
        parse: Makes the message.

    Raises:
        ValueError: It has too many fields, or `check_limits` finds one with too much.
        DecodeError: The bytes are no message.
    """
    if len(raw) > _LEAST_BYTES * MAX_PEER_FIELDS:  # else it cannot have more
        check_num_fields(raw, descriptor, MAX_PEER_FIELDS, counts_numbers=False)
    message = parse(raw)
    check_limits(message)
    return message


def check_limits(message: Message) -> None:
    """Check that no field of a message, or of a nested one, holds more than the contract allows.

    Nested messages of CHECKED_ALONE are left out.

    Raises:
        ValueError: Names the field, what was found and what is allowed.
    """
    if excess := _excess(message):
        raise ValueError(excess)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FieldLimits:
    """What a field may hold; see the options in common.proto. None: no limit of its own."""

    is_repeated: bool
    is_message: bool
    most: int | None
    most_each: int | None

    def excess(self, value: Any) -> str:
        """Return what of a value is too much, to follow the field's name; empty: nothing."""
        if self.most is not None:
            is_lone_message = self.is_message and not self.is_repeated
            found = value.ByteSize() if is_lone_message else len(value)
            if found > self.most:
                unit = "bytes" if is_lone_message else _UNITS.get(type(value), "items")
                return f": found {found} {unit}; allowed: at most {self.most}"
        if self.is_message and self.is_repeated:
            for index, each in enumerate(value):
                # Most are small, and to look at their size costs less than to look at their fields.
                is_safe = each.ByteSize() <= _limits_of(each.DESCRIPTOR).safe_bytes
                if not is_safe and (excess := _excess(each)):
                    return f"[{index}].{excess}"
        elif self.is_message:
            excess = _excess(value)
            return excess and f".{excess}"
        elif self.most_each is not None:
            for index, each in enumerate(value):
                if len(each) > self.most_each:
                    found, allowed = len(each), f"allowed: at most {self.most_each}"
                    return f"[{index}]: found {found} characters; {allowed}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _MessageLimits:
    """What the fields of a message may hold."""

    safe_bytes: int  # a message up to this size cannot have too much of anything
    fields: Mapping[int, _FieldLimits]  # by number


def _excess(message: Message) -> str:
    """Return what of a message is too much, beginning with a field's name; empty: nothing."""
    limits = _limits_of(message.DESCRIPTOR).fields
    for field, value in message.ListFields() if limits else ():
        limited = limits.get(field.number)
        if limited and (excess := limited.excess(value)):
            return f"{field.name}{excess}"
    return ""


@cache
def _limits_of(descriptor: Any) -> _MessageLimits:
    sizes = {field.number: _least_excess(field) for field in descriptor.fields}
    return _MessageLimits(
        safe_bytes=min(sizes.values(), default=_NO_EXCESS) - 1,
        fields={
            field.number: _FieldLimits(
                is_repeated=field.is_repeated,
                is_message=field.message_type is not None,
                most=_option(field, most),
                most_each=_option(field, most_each),
            )
            for field in descriptor.fields
            if sizes[field.number] < _NO_EXCESS
        },
    )


def _least_excess(field: Any) -> int:
    """Return the bytes that a field has at least when it, or one within it, holds too much."""
    least, waiting = _NO_EXCESS, [field]
    seen: set[str] = set()
    while waiting:
        each = waiting.pop()
        if (limit := _option(each, most)) is not None:
            least = min(least, (limit + 1) * (_least_item(each) if each.is_repeated else 1))
        if (limit := _option(each, most_each)) is not None:
            least = min(least, limit + 1)
        nested = each.message_type
        if nested and nested.full_name not in seen | CHECKED_ALONE:
            seen.add(nested.full_name)
            waiting += nested.fields
    return least


def _least_item(field: Any) -> int:
    """Return the bytes of the shortest item of a repeated field."""
    if not field.is_packed:
        return _LEAST_BYTES
    return {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}.get(field.type, 1)


def _option(field: Any, option: Any) -> int | None:
    """Return the value of a field's option; None: it is unset."""
    options = field.GetOptions()
    return options.Extensions[option] if options.HasExtension(option) else None
