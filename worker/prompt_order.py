"""Which of several prompts is computed next: mostly a short one before a long one.

A short prompt hardly delays a long one behind it, but behind a long one it may wait many times as
long as its own computation takes. The sooner it is computed, the sooner it is a row of the decode
steps, too, which take hardly longer for it. So the prompt with the highest ratio of its wait to
what is left of it goes first: of prompts that came together the shortest, and a long one when it
has waited in proportion. While more prompts come than can be computed, the ratio alone would keep
the longest waiting forever. So the wait has a limit: prompts that have reached it go before all
others, in order of arrival.

Pure: the clock is the time of the engine's steps so far.

Source: highest response ratio next (Brinch Hansen, Short-term scheduling in multiprogramming
systems, 1971), with what is left in place of the whole, so that prompts also take turns when they
are computed in part.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Awaited(Protocol):
    """A prompt whose first token somebody waits for."""

    @property
    def arrived_s(self) -> float:
        """The clock when it arrived."""

    @property
    def num_left(self) -> int:
        """How many tokens are still to be computed, as far as is known."""


# About as long as a step. Each wait counts as longer by this. Otherwise a prompt that came just now
# would let all others go first for a step, whatever their length.
STEP_S = 0.1

PromptT = TypeVar("PromptT", bound=Awaited)


def in_turn(prompts: Iterable[PromptT], *, now_s: float, max_overtaken_s: float) -> list[PromptT]:
    """Return prompts in the order in which they are computed.

    Args:
        prompts: In any order; equal ones keep theirs.
        now_s: The clock.
        max_overtaken_s: The wait after which a prompt goes first; 0: all go in order of arrival.
    """

    def turn_of(prompt: PromptT) -> tuple[int, float, int]:
        waited_s = now_s - prompt.arrived_s
        if waited_s >= max_overtaken_s:
            return (0, prompt.arrived_s, 0)
        num_left = max(prompt.num_left, 1)
        return (1, -(waited_s + STEP_S) / num_left, num_left)

    return sorted(prompts, key=turn_of)
