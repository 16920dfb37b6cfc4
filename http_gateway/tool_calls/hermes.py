"""Calls between tags, as Qwen and Hermes write them: <tool_call>{"name": ...}</tool_call>."""

from collections.abc import Callable

from http_gateway.parts import Part
from http_gateway.tool_calls.reader import MarkedReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(MarkedReader):
    """Reads content with calls in it.

    Args:
        new_id: Makes the id of a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(BEGIN, new_id)

    def _open(self, parts: list[Part]) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._text.startswith("{"):
            self._step = self._read_call
        else:
            parts += self._content(self._gap + BEGIN)
            self._step = self._begin
        return True

    def _end_call(self, parts: list[Part]) -> bool:
        self._text = text = self._text.lstrip()
        if not text.startswith(END) and END.startswith(text):
            return False
        self._go_on_with_content(text.removeprefix(END))
        return True
