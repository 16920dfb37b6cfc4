"""The parts of an answer's text: reasoning, content, and calls of tools."""

from dataclasses import dataclass
from typing import Protocol

# Of a run that templates may drop: each further token of the run would cost a look at all of it.
MAX_BLANKS = 1000


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of a function call."""

    index: int  # among the calls of the answer
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, as the model writes them."""

    index: int
    text: str


Part = Reasoning | Content | CallBegins | CallArguments


class PartReader(Protocol):
    """Reads text that comes in pieces; the parts do not depend on how it is cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """Return the text that was held back; the text ends here."""
        ...


def held(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that `marker` may begin with, short of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def without_end(text: str, blanks: str | None = None) -> str:
    """Return `text` without the blanks at its end, at most MAX_BLANKS of them.

    Args:
        text: Any text.
        blanks: The characters that count; None: all white space.
    """
    end = text[-MAX_BLANKS:]
    return text[: len(text) - len(end)] + end.rstrip(blanks)
