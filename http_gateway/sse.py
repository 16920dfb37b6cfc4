"""Server-sent events, made of prepared text: two chunks differ little."""

import json
from json.encoder import encode_basestring
from typing import Any

DONE = b"data: [DONE]\n\n"


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return encode_basestring(text)


def compact(value: Any) -> str:
    """Return a value as JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def json_bytes(text: str) -> bytes:
    """Return JSON as bytes. UTF-8 has no lone surrogates: in its texts they become escapes."""
    return text.encode(errors="backslashreplace")


class Chunks:
    """Makes the chunks of one stream of completions.

    Args:
        head: The fields that all chunks share.
        has_usage: Whether they have `usage`, null except in the last one.
    """

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._head = compact(head)[:-1]
        self._before = f'data: {self._head},"choices":['
        self._after = ',"usage":null}\n\n' if has_usage else "}\n\n"

    def chunk(self, choice: str) -> str:
        """Return a chunk with one choice, which is JSON."""
        return f"{self._before}{choice}]{self._after}"

    def usage(self, usage: dict[str, Any]) -> str:
        """Return the chunk that has the usage and no choice."""
        return f'{self._before}],"usage":{compact(usage)}}}\n\n'
