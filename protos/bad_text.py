"""Finds the text that keeps a serialized message from being parsed: parsers do not name it."""

from collections import Counter
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from protos.field_count import BYTES, FIXED32, FIXED64, VARINT, read_varint

MAX_DEPTH = 100  # of messages within messages: parsers go no deeper


def find_bad_text(raw: bytes, descriptor: Any) -> str:
    """Return the path of a text that is not UTF-8, and where; empty: all of them are.

    Args:
        raw: The serialized message.
        descriptor: The descriptor of its type.

    Raises:
        ValueError: The bytes are not a message, or nested more deeply than a parser goes.

    Source: protobuf's encoding (https://protobuf.dev/programming-guides/encoding/).
    """
    messages = [(0, len(raw), descriptor, "")]  # first byte, end, type, path; not looked at yet
    while messages:
        at, end, message, path = messages.pop()
        if path.count(".") > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} messages within messages")
        seen: Counter[int] = Counter()  # field number |-> how many of it
        while at < end:
            tag, at = read_varint(raw, at)
            field, kind = message.fields_by_number.get(tag >> 3), tag & 7
            if kind == VARINT:
                _, at = read_varint(raw, at)
            elif kind in (FIXED64, FIXED32):
                at += 8 if kind == FIXED64 else 4
            elif kind == BYTES:
                size, at = read_varint(raw, at)
                if field is not None:
                    item = f"[{seen[field.number]}]" if field.is_repeated else ""
                    seen[field.number] += 1
                    name = f"{path}{field.name}{item}"
                    if field.message_type:
                        messages.append((at, at + size, field.message_type, f"{name}."))
                    elif field.type == FieldDescriptor.TYPE_STRING:
                        try:
                            raw[at : at + size].decode()
                        except UnicodeDecodeError as error:
                            return f"{name}: byte {error.start} is not UTF-8"
                at += size
            else:
                raise ValueError(f"wire type {kind} at byte {at}")
    return ""
