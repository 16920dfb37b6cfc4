"""Fake grammars, and threads for them whose work ends when a test lets it.

Which tokens may come next depends on the constraint and on each token before. A mask of another
place or of another text, or none, thus mostly draws another token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from grammars.bits import TokenBits
from grammars.constraint import Constraint
from worker.grammar_threads import Then

VOCAB_SIZE = 50
NUM_ALLOWED = 5


def allowed_after(constraint: Constraint | None, output: Sequence[int]) -> TokenBits | None:
    """Return the tokens that a constraint allows after an output; None: there is none."""
    if constraint is None:
        return None
    allowed = np.zeros(64, dtype=np.bool_)
    text = f"{constraint.text} {list(output)}"
    allowed[Random(text).sample(range(VOCAB_SIZE), NUM_ALLOWED)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


class FakeMatcher:
    """Does the work of grammars.matcher.Matcher."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids

    def allowed(self) -> TokenBits | None:
        return allowed_after(self._constraint, self._token_ids)


class FakeGrammars:
    """Does the work of grammars.store.Grammars."""

    def begin(self, constraint: Constraint, salt: bytes) -> FakeMatcher:
        return FakeMatcher(constraint)


@dataclass(eq=False)
class _Piece:
    work: Callable[[], None]
    then: Then
    is_done: bool = False


class HeldThreads:
    """Does the work of worker.grammar_threads.GrammarThreads."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    @property
    def is_held(self) -> bool:
        """Whether a piece waits."""
        return bool(self._pieces)

    def add(self, salt: bytes, work: Callable[[], None], then: Then) -> None:
        self._pieces.append(_Piece(work, then))

    def let_go(self, which: int, error: Exception | None = None) -> None:
        """Let a piece be worked on, or raise the error; if it was done before, let that be told."""
        piece = self._pieces[which % len(self._pieces)]
        if not piece.is_done and error is None:
            piece.work()
            piece.is_done = True
            return
        self._pieces.remove(piece)
        piece.then(None if piece.is_done else error)
