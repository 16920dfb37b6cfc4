"""Calls after a marker, as Mistral writes them, in its older and its newer form.

[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}    [CALL_ID] is optional
"""

import re
from collections.abc import Callable

from http_gateway.parts import MAX_BLANKS, CallBegins, Part
from http_gateway.tool_calls.json_call import ArgumentsReader
from http_gateway.tool_calls.reader import MarkedReader

MARKER = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.:-]{1,256})\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAME_CHARS = 400


class MistralReader(MarkedReader):
    """Reads content, and the calls after markers.

    Args:
        new_id: Makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(MARKER, new_id)
        self._arguments = ArgumentsReader(0)  # of a call by the newer form
        self._is_in_array = False

    def _open(self, parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if len(self._text) - len(text) > MAX_BLANKS:
            self._read_as_content(parts)
        elif text.startswith("["):
            self._text, self._step, self._is_in_array = text[1:], self._read_array, True
        elif text.startswith("{"):
            self._text, self._step, self._is_in_array = text, self._read_call, False
        elif named := _NAMED.match(text):
            parts.append(CallBegins(self._num_calls, self._new_id(), named[1]))
            self._arguments = ArgumentsReader(self._num_calls)
            self._text, self._step = text[named.end() :], self._read_arguments
        elif len(text) > _MAX_NAME_CHARS:
            self._read_as_content(parts)
        else:
            return False
        return True

    def _read_as_content(self, parts: list[Part]) -> None:
        parts += self._content(self._gap + MARKER)
        self._step = self._begin

    def _read_array(self, parts: list[Part]) -> bool:
        text = self._text = self._text.lstrip(" \n\t,")
        if not text:
            return False
        if text.startswith("{"):
            self._step = self._read_call
        else:
            self._go_on_with_content(text.removeprefix("]"))
        return True

    def _end_call(self, parts: list[Part]) -> bool:
        if self._is_in_array:
            self._step, self._is_behind_call = self._read_array, True
        else:
            self._go_on_with_content(self._text)
        return True

    def _before_call(self) -> str:
        return ""  # an object that breaks off within an array is shown by itself

    def _read_arguments(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        more, rest = self._arguments.push(text)
        parts += more
        if rest is None:
            return False
        self._num_calls += 1
        self._call = self._next_call()
        self._go_on_with_content(rest)
        return True
