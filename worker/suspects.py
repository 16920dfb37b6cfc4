"""Isolates requests that took part in a failed pass, so that they cannot harm others."""

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class MaybeSuspect(Protocol):
    """A request or a prompt."""

    @property
    def is_suspect(self) -> bool:
        """Whether a pass that computed for it failed, and none has succeeded since."""
        ...


T = TypeVar("T", bound=MaybeSuspect)


class SuspectTurns(Generic[T]):
    """Chooses the next pass: each suspect computes alone, between passes of all others."""

    def __init__(self) -> None:
        self._turns: dict[T, int] = {}  # suspect |-> its last turn, for suspects that were ready
        self._num_turns = 0
        self._was_alone = False  # the last pass was a suspect's

    def next_pass(self, ready: Iterable[T]) -> Callable[[T], bool]:
        """Return the ready items that take part in the next pass."""
        ready = list(dict.fromkeys(ready))
        suspects = [each for each in ready if each.is_suspect]
        self._turns = {each: self._turns.get(each, 0) for each in suspects}
        if not suspects or (self._was_alone and len(suspects) < len(ready)):
            self._was_alone = False
            return lambda each: not each.is_suspect
        self._was_alone = True
        chosen = min(suspects, key=lambda each: self._turns[each])  # the first of equals
        self._num_turns += 1
        self._turns[chosen] = self._num_turns
        return lambda each: each is chosen
