"""Calls that are the whole answer, as Llama 3 writes them: {"name": "f", "parameters": {...}}."""

from collections.abc import Callable, Collection

from http_gateway.parts import MAX_BLANKS, Content, Part
from http_gateway.tool_calls.reader import CallReader

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = " \n\t;,"  # of several calls
_TAGS = ("<|eom_id|>", "<|eot_id|>", PYTHON_TAG)


class LlamaReader(CallReader):
    """Reads an answer that is either calls or content.

    JSON that names none of the tools is content: a model may be asked for JSON.

    Args:
        new_id: Makes the id of a call.
        tools: Names of the request's functions.
    """

    def __init__(self, new_id: Callable[[], str], tools: Collection[str]) -> None:
        super().__init__(new_id, frozenset(tools).__contains__)

    def finish(self) -> list[Part]:
        """Return what was held back, also of an object that had not said its function yet."""
        if self._step == self._end_call or (self._is_in_call and self._call.has_begun):
            return []
        text = self._call.text + self._text
        return [Content(text)] if text else []

    def _begin(self, parts: list[Part]) -> bool:
        text = self._text.lstrip()
        if len(self._text) - len(text) > MAX_BLANKS:
            self._step = self._read_content
            return True
        if text.startswith(PYTHON_TAG):
            self._text, self._step = text[len(PYTHON_TAG) :], self._begin_behind_tag
        elif PYTHON_TAG.startswith(text):  # or nothing has come yet
            return False
        elif text.startswith("{"):
            self._text, self._step = text, self._read_call
        else:
            self._step = self._read_content
        return True

    def _begin_behind_tag(self, parts: list[Part]) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._step = self._read_call if self._text.startswith("{") else self._read_content
        return True

    def _end_call(self, parts: list[Part]) -> bool:
        self._text = self._text.lstrip(_BETWEEN)
        for tag in _TAGS:
            if self._text.startswith(tag):
                self._text = self._text[len(tag) :]
                return True
            if tag.startswith(self._text):
                return False
        self._step = self._read_call if self._text.startswith("{") else self._read_content
        return True

    def _refuse_call(self, parts: list[Part], text: str) -> None:
        self._text, self._step = text + self._text, self._read_content

    def _read_content(self, parts: list[Part]) -> bool:
        if self._text:
            parts.append(Content(self._text))
            self._text = ""
        return False
