"""Which of several prompts is computed next: mostly a short one before a long one.

A long prompt hardly notices a short one before it, whereas a short one behind it may wait many
times as long as it takes. Its first token is also the sooner a further row of the decode steps,
which hardly get longer by it. So the prompt with the highest ratio of its wait to what is left of
it goes first: of those that came together the shortest, and a long one when it has waited in
proportion. While more prompts come than can be computed, that alone would keep the longest waiting
for ever. So there is a limit of the wait, and whoever has reached it goes before all others, in
order of arrival.

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
        """How many tokens are to be computed yet, as far as is known."""


# About as long as a step. All waits count as longer by this, or a prompt that came just now would
# let everything go first for a step, whatever its length.
STEP_S = 0.1

PromptT = TypeVar("PromptT", bound=Awaited)


def in_turn(prompts: Iterable[PromptT], *, now_s: float, max_overtaken_s: float) -> list[PromptT]:
    """Return prompts in the order in which they are computed.

    Args:
        prompts: The oldest first.
        now_s: The clock.
        max_overtaken_s: The wait after which a prompt goes first; 0: all go as they came.
    """

    def turn_of(prompt: PromptT) -> tuple[int, float, int]:
        waited_s = now_s - prompt.arrived_s
        if waited_s >= max_overtaken_s:
            return (0, 0.0, 0)  # equal: sorting keeps the order
        num_left = max(prompt.num_left, 1)
        return (1, -(waited_s + STEP_S) / num_left, num_left)

    return sorted(prompts, key=turn_of)
