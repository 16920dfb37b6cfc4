"""What the readers of all formats share: undecided text, the call that is being read, and steps.

A reader's state is the step that reads on: it takes what it can of the undecided text, and returns
whether another step may follow at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from http_gateway.parts import Content, Part, held, without_end
from http_gateway.tool_calls.json_call import JsonCall, NoCall

Step = Callable[[list[Part]], bool]


class CallReader(ABC):
    """Reads calls that are JSON objects.

    Args:
        new_id: Makes the id of a call.
        is_tool: Tells whether a name is that of a function.
    """

    def __init__(self, new_id: Callable[[], str], is_tool: Callable[[str], bool]) -> None:
        self._new_id = new_id
        self._is_tool = is_tool
        self._text = ""  # not decided yet
        self._num_calls = 0
        self._call = self._next_call()
        self._step: Step = self._begin

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain with some more text."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[Part]:
        """Return what was held back, also of a call that had not said its function yet."""

    @abstractmethod
    def _begin(self, parts: list[Part]) -> bool:
        """Read the beginning of an answer."""

    @abstractmethod
    def _end_call(self, parts: list[Part]) -> bool:
        """Read what follows a call."""

    @abstractmethod
    def _refuse_call(self, parts: list[Part], text: str) -> None:
        """Take an object that was read as a call and is none."""

    @property
    def _is_in_call(self) -> bool:
        return self._step == self._read_call

    def _read_call(self, parts: list[Part]) -> bool:
        text, self._text = self._text, ""
        try:
            more, rest = self._call.push(text)
        except NoCall as other:
            self._text, self._call = other.rest, self._next_call()
            self._refuse_call(parts, other.text)
            return True
        parts += more
        if rest is None:
            return False
        self._num_calls += 1
        self._text, self._call, self._step = rest, self._next_call(), self._end_call
        return True

    def _next_call(self) -> JsonCall:
        return JsonCall(self._num_calls, self._new_id, self._is_tool)


class MarkedReader(CallReader):
    """Reads content that has calls after a marker; blanks around calls are dropped.

    Args:
        marker: Stands before calls.
        new_id: Makes the id of a call.
    """

    def __init__(self, marker: str, new_id: Callable[[], str]) -> None:
        self._marker = marker
        self._gap = ""  # blanks before the marker: content, if no call follows
        self._is_behind_call = False  # and no content has followed
        super().__init__(new_id, is_tool=bool)

    def finish(self) -> list[Part]:
        """Return what was held back, also of a call that had not said its function yet."""
        text, self._text = self._text, ""
        if self._step == self._begin:
            return self._content(text)
        if self._step == self._open:
            return self._content(self._gap + self._marker + text)
        if self._is_in_call and not self._call.has_begun:
            return self._content(self._before_call() + self._call.text)
        return []

    @abstractmethod
    def _open(self, parts: list[Part]) -> bool:
        """Read what follows the marker."""

    def _before_call(self) -> str:
        """Return what is content, too, if the object that is read is not a call."""
        return self._gap + self._marker

    def _begin(self, parts: list[Part]) -> bool:
        content, marker, rest = self._text.partition(self._marker)
        undecided = 0 if marker else held(content, self._marker)
        certain = without_end(content[: len(content) - undecided])
        parts += self._content(certain)
        if not marker:
            self._text = content[len(certain) :]
            return False
        self._gap = content[len(certain) :]
        self._text, self._step = rest, self._open
        return True

    def _refuse_call(self, parts: list[Part], text: str) -> None:
        parts += self._content(self._before_call() + text)
        self._step = self._begin

    def _go_on_with_content(self, text: str) -> None:
        """Read content again, after a call."""
        self._text, self._step, self._is_behind_call = text, self._begin, True

    def _content(self, text: str) -> list[Part]:
        if self._is_behind_call:
            text = text.lstrip()
        self._is_behind_call &= not text
        return [Content(text)] if text else []
