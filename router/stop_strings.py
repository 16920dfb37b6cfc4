"""Finds stop strings in a stream of text, across the borders of its pieces."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """The result of a piece of text."""

    text: str  # safe to send: no stop string begins in it
    stopped_by: str = ""  # the stop string that was found; nothing follows it


class StopStrings:
    """Holds back text that may be the beginning of a stop string.

    The text ends before the stop string that is complete first; of several that end at the same
    character, before the longest. The result does not depend on how the text is cut into pieces.
    A character takes a few operations for each stop string, whatever these and the text are: all
    of a router's streams wait meanwhile.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._begun = [_Begun(each) for each in stop]
        self._first_characters = frozenset(each[0] for each in stop)
        self._held = ""

    def push(self, piece: str) -> StopResult:
        """Return the text that is safe to send, and the stop string that ended it, if any."""
        if not self._held and self._first_characters.isdisjoint(piece):
            return StopResult(piece)
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            found = [each.stop for each in self._begun if each.push(character)]
            if found:
                stop = max(found, key=len)
                self._held = ""
                return StopResult(text[: end - len(stop)], stop)
        num_held = max((each.length for each in self._begun), default=0)
        self._held = text[len(text) - num_held :]
        return StopResult(text[: len(text) - num_held])

    def finish(self) -> str:
        """Return the text that was held back; the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Begun:
    """How much of a stop string the text ends with.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (1977).

    Attributes:
        length: Characters of the longest beginning of the stop string that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # Of each beginning that was reached: the length of the longest shorter one that ends it
        self._shorter = [0]

    def push(self, character: str) -> bool:
        """Take the next character; return whether the stop string is complete, which ends all."""
        stop, shorter, length = self.stop, self._shorter, self.length
        while length and stop[length] != character:
            length = shorter[length - 1]
        if stop[length] == character:
            length += 1
        self.length = length
        if length == len(stop):
            return True
        if length > len(shorter):
            within = shorter[-1]
            while within and stop[within] != character:
                within = shorter[within - 1]
            shorter.append(within + (stop[within] == character))
        return False
