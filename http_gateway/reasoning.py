"""Divides an answer into reasoning and the rest: <think> reasoning </think> rest."""

from enum import Enum, auto

from http_gateway.parts import (
    MAX_BLANKS,
    Content,
    Part,
    PartReader,
    Reasoning,
    held,
    without_end,
)

BEGIN, END = "<think>", "</think>"


class _State(Enum):
    BEGINNING = auto()  # blanks at most: <think> may follow
    REASONING = auto()
    GAP = auto()  # empty lines between reasoning and answer
    ANSWER = auto()


class ReasoningReader:
    """Reads the reasoning, and leaves the rest to another reader.

    Empty lines around the reasoning belong to the template and are dropped.

    Args:
        is_begun: The prompt ends with <think>, so the text begins within the reasoning.
        answer: Reads the rest; None: all of it is content.
    """

    def __init__(self, *, is_begun: bool, answer: PartReader | None) -> None:
        self._state = _State.BEGINNING
        self._is_begun = is_begun
        self._answer = answer
        self._text = ""  # not decided yet
        self._has_reasoning = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer has not begun yet."""
        return self._state is not _State.ANSWER

    @property
    def has_begun(self) -> bool:
        """Whether there is reasoning, and the answer has not begun yet."""
        return self._state in (_State.REASONING, _State.GAP)

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain after more text."""
        if self._state is _State.ANSWER:
            return self._rest(text)
        self._text += text
        if self._state is _State.BEGINNING:
            self._begin()
        parts: list[Part] = []
        if self._state is _State.REASONING:
            parts += self._reason()
        if self._state is _State.GAP:
            self._text = self._text.lstrip("\n")
            if self._text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            parts += self._rest(self._take())
        return parts

    def finish(self) -> list[Part]:
        """Return the text that was held back."""
        parts: list[Part] = []
        if self._state is _State.REASONING or self._is_begun:
            parts += self._reasoning(without_end(self._take(), "\n"))
        elif text := self._take():
            parts += self._rest(text)
        return parts + (self._answer.finish() if self._answer else [])

    def _begin(self) -> None:
        text = self._text.lstrip()
        num_blanks = len(self._text) - len(text)
        if text.startswith(BEGIN) and num_blanks <= MAX_BLANKS:
            self._text = text[len(BEGIN) :]
            self._state = _State.REASONING
        elif not BEGIN.startswith(text) or num_blanks > MAX_BLANKS:
            self._state = _State.REASONING if self._is_begun else _State.ANSWER
        if self._state is not _State.BEGINNING:
            self._is_begun = False

    def _reason(self) -> list[Part]:
        if not self._has_reasoning:
            self._text = self._text.lstrip("\n")
        reasoning, end, rest = self._text.partition(END)
        if end:
            self._text, self._state = rest, _State.GAP
            return self._reasoning(without_end(reasoning, "\n"))
        certain = without_end(reasoning[: len(reasoning) - held(reasoning, END)], "\n")
        self._text = reasoning[len(certain) :]
        return self._reasoning(certain)

    def _reasoning(self, text: str) -> list[Part]:
        self._has_reasoning |= bool(text)
        return [Reasoning(text)] if text else []

    def _rest(self, text: str) -> list[Part]:
        if self._answer:
            return self._answer.push(text)
        return [Content(text)] if text else []

    def _take(self) -> str:
        text, self._text = self._text, ""
        return text
