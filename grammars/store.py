"""The grammars of a model's requests, each compiled once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from grammars.constraint import Constraint

if TYPE_CHECKING:  # loaded with the first constraint
    from grammars.matcher import Grammar, Matcher, Vocabulary
    from grammars.vocabulary import ModelTokens

MAX_KEPT_BYTES = 1 << 20  # of constraints, as clients wrote them
MAX_KEPT = 64  # each may take 40 MB at worst, usually far below one


class Grammars:
    """Compiles grammars and keeps the latest. Calls may block: make them in threads.

    Args:
        read_vocabulary: Returns the model's tokens; called for the first constraint.
        end_token_ids: The model's end tokens; empty: no answer can be constrained.
    """

    def __init__(
        self, read_vocabulary: "Callable[[], ModelTokens]", end_token_ids: Sequence[int]
    ) -> None:
        self._read_vocabulary = read_vocabulary
        self._end_token_ids = end_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[bytes, Constraint], Future[Grammar]] = OrderedDict()
        self._num_bytes = 0

    def begin(self, constraint: Constraint, salt: bytes = b"") -> "Matcher":
        """Return the position of an empty text in the grammar of a constraint.

        Args:
            constraint: What a request asks for.
            salt: Of the tenant's cache. A grammar is kept for one tenant, or others would learn
                from the time of an answer what it has asked for.

        Raises:
            InvalidConstraint: It cannot be compiled.
            NoVocabulary: The model's tokenizer cannot be used.
        """
        key = salt, constraint
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                mine: Future[Grammar] = Future()
                self._keep(key, mine)
            else:
                self._kept.move_to_end(key)
        if found is not None:
            return found.result().begin()
        try:
            mine.set_result(self._compile(constraint))
        except BaseException as error:
            mine.set_exception(error)
            with self._lock:
                self._drop(key, mine)
        return mine.result().begin()

    def _compile(self, constraint: Constraint) -> "Grammar":
        from grammars.matcher import Grammar, Vocabulary

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._read_vocabulary(), self._end_token_ids)
        return Grammar(constraint, self._vocabulary)

    def _keep(self, key: tuple[bytes, Constraint], grammar: "Future[Grammar]") -> None:
        self._kept[key] = grammar
        self._num_bytes += key[1].num_bytes
        while len(self._kept) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            (_, oldest), _ = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _drop(self, key: tuple[bytes, Constraint], grammar: "Future[Grammar]") -> None:
        if self._kept.get(key) is grammar:
            del self._kept[key]
            self._num_bytes -= key[1].num_bytes
