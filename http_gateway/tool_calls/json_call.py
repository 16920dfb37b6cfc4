"""One call of a tool as JSON, read while it is written: {"name": "f", "arguments": {...}}."""

import json
import re
from collections.abc import Callable

from http_gateway.parts import CallArguments, CallBegins, Part

# The usual order of keys lets arguments be passed on while they come; `parameters` is Llama's name.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])'
)
_MAX_HEAD_CHARS = 1_000  # a longer one is read as a whole, at its end
_ARGUMENTS = ("arguments", "parameters")
_BRACKETS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class NoCall(Exception):
    """What was read is not a call; `text` is all of it, `rest` what followed."""

    def __init__(self, text: str, rest: str) -> None:
        super().__init__("no call of a tool")
        self.text = text
        self.rest = rest


class ValueEnd:
    """Finds the end of a JSON object, array or string that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._at = 0  # up to where the text was looked at

    def find(self, text: str) -> int:
        """Return the index after the value, -1 while it continues.

        Args:
            text: All that has come, from the value's first character on.
        """
        while True:
            pattern = _IN_STRING if self._is_in_string else _BRACKETS
            found = pattern.search(text, self._at)
            if found is None:
                self._at = len(text)
                return -1
            mark, end = found[0], found.end()
            if mark == "\\":
                if end == len(text):  # what it escapes has not come yet
                    self._at = found.start()
                    return -1
                end += 1
            elif mark == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark in "{[" else -1
            self._at = end
            if not self._is_in_string and self._depth <= 0:
                return end


class ArgumentsReader:
    """Passes a call's arguments on as they come: those of an object as written, those that are a
    JSON string when it is whole.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._end = ValueEnd()
        self._num_sent = 0

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Return the parts, and what follows the arguments; None: they go on."""
        self._text += text
        end = self._end.find(self._text)
        if self._text.startswith('"'):
            if end < 0:
                return [], None
            written = self._text[:end]
            unquoted = _unquoted(written)
            return self._part(written if unquoted is None else unquoted), self._text[end:]
        until = end if end >= 0 else len(self._text)
        new, self._num_sent = self._text[self._num_sent : until], until
        return self._part(new), (self._text[end:] if end >= 0 else None)

    def _part(self, text: str) -> list[Part]:
        return [CallArguments(self._index, text)] if text else []


class JsonCall:
    """Reads one call.

    Args:
        index: Among the answer's calls.
        new_id: Makes its id.
        is_tool: Tells whether a function is one of the request's; where an answer may be JSON of
            its own, only then it is a call.
    """

    def __init__(
        self, index: int, new_id: Callable[[], str], is_tool: Callable[[str], bool]
    ) -> None:
        self._index = index
        self._new_id = new_id
        self._is_tool = is_tool
        self._text = ""
        self._end = ValueEnd()
        self._arguments: ArgumentsReader | None = None  # once the head was read
        self._has_arguments = False  # all of them

    @property
    def text(self) -> str:
        """What was read."""
        return self._text

    @property
    def has_begun(self) -> bool:
        """Whether it was told that there is a call."""
        return self._arguments is not None

    def push(self, text: str) -> tuple[list[Part], str | None]:
        """Return the parts, and what follows the call; None: it goes on.

        Raises:
            NoCall: The object has ended and is not a call.
        """
        before = len(self._text)
        self._text += text
        end = self._end.find(self._text)
        parts: list[Part] = []
        arguments = ""
        if self._arguments is not None:
            arguments = self._text[before : end if end >= 0 else None]
        elif head := self._head():
            name, begin = head
            self._arguments = ArgumentsReader(self._index)
            parts.append(CallBegins(self._index, self._new_id(), name))
            arguments = self._text[begin : end if end >= 0 else None]
        if self._arguments is not None and not self._has_arguments:
            more, rest = self._arguments.push(arguments)
            parts += more
            self._has_arguments = rest is not None
        if end < 0:
            return parts, None
        if self._arguments is None:
            parts += self._whole(self._text[:end], self._text[end:])
        return parts, self._text[end:]

    def _head(self) -> tuple[str, int] | None:
        """Return the function's name, and where its arguments begin; None: not known yet."""
        if len(self._text) > _MAX_HEAD_CHARS or not (head := _HEAD.match(self._text)):
            return None
        name = _unquoted(head[1])
        return (name, head.end()) if name is not None and self._is_tool(name) else None

    def _whole(self, text: str, rest: str) -> list[Part]:
        """Read an object whose keys have another order, or that has no arguments."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            raise NoCall(text, rest) from None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not name or not self._is_tool(name):
            raise NoCall(text, rest)
        given = [call[each] for each in _ARGUMENTS if call.get(each) is not None]
        arguments = given[0] if given else {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        begins = CallBegins(self._index, self._new_id(), name)
        return [begins, CallArguments(self._index, arguments)]


def _unquoted(string: str) -> str | None:
    """Return the text of a JSON string; None: it is none, as with an escape of Markdown."""
    try:
        return str(json.loads(string))
    except ValueError:
        return None
