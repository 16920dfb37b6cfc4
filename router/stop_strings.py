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
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str) -> StopResult:
        """Return the text that is safe to send, and the stop string that ended it, if any."""
        text = self._held + piece
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return StopResult(text[: end - len(stop)], stop)
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return StopResult(text[: len(text) - num_held])

    def finish(self) -> str:
        """Return the text that was held back; the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
