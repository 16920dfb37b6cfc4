"""Compiled grammars, and positions of texts in them: which tokens may come next.

Counts, not times, bound a grammar: every host refuses it, or ends its text with an error, at the
same place. The library counts what all texts of a compiled grammar needed; a text that this stops
is followed again from a newly compiled one. The library releases the GIL while it works.
"""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import llguidance
import numpy as np

from grammars.bits import TokenBits
from grammars.constraint import (
    NUM_OWN_LINES,
    Constraint,
    ConstraintKind,
    is_lark,
    lark_grammar,
)
from grammars.errors import GrammarTooComplex, InvalidConstraint, NotInGrammar
from grammars.tool_calls import MARKERS, read_tool_calls
from grammars.vocabulary import ModelTokens

T = TypeVar("T")

# One mask then takes at most about 100 ms, usually 0.01 to 0.2 ms.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=20_000,  # of 1 to 2 kB
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_REASON_CHARS = 500
_DEAD_END = "no token can follow"
_ECHO = re.compile(r"^\s*\d+ \| |^\s*\^\s*$|<non-verbose")  # lines that repeat the grammar
_FORE_WORDS = re.compile(r"failed to compile JSON schema: |regex parse error: .* error: ")
_WHOLE_REGEX = re.compile(r'invalid regex ".*" \(in regex\): ')
# The library's words; an expression of its own, or a number, follows.
_TOO_COMPLEX = re.compile("Unable to determine if regex is empty|fuel exhausted")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")  # line and column
_WORDS = {
    ConstraintKind.JSON_SCHEMA: "a schema",
    ConstraintKind.JSON_OBJECT: "an object",
    ConstraintKind.REGEX: "an expression",
    ConstraintKind.CHOICE: "texts",
    ConstraintKind.GRAMMAR: "a grammar",
    ConstraintKind.TOOL_CALLS: "functions",
}
_SCHEMA = (
    "JSON Schema (Draft 2020-12), with oneOf and patternProperties only where disjoint, and "
    "$ref only within the schema"
)
_ALLOWED = {
    ConstraintKind.JSON_SCHEMA: _SCHEMA,
    ConstraintKind.JSON_OBJECT: "any object",
    ConstraintKind.REGEX: "the syntax common to Rust and Python, without look-around and back "
    "references, and with ^ and $ only at the ends",
    ConstraintKind.CHOICE: "different texts",
    ConstraintKind.GRAMMAR: "EBNF of llama.cpp (root ::= ...) or Lark (start: ...), without "
    "references to tokens",
    ConstraintKind.TOOL_CALLS: f"functions whose parameters are an object in {_SCHEMA}",
}


class Vocabulary:
    """The tokens of a model, ready for its grammars.

    Args:
        tokens: The model's tokens; one without text is never drawn, except markers of calls.
        end_token_ids: The model's end tokens, at least one. They end a text where its grammar
            allows it.
    """

    def __init__(self, tokens: ModelTokens, end_token_ids: Sequence[int]) -> None:
        self.size = len(tokens.texts)
        self.markers = {text: tokens.added[text] for text in MARKERS if text in tokens.added}
        special = [token_id for token_id, each in enumerate(tokens.texts) if not each]
        # The library treats special tokens with equal (or no) text as one token.
        texts = [text or b"<|%d|>" % token_id for token_id, text in enumerate(tokens.texts)]
        wrapper = llguidance.TokenizerWrapper(_Tokens(texts, special, end_token_ids[0]))
        self.tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=self.size, eos_token=list(end_token_ids)
        )
        drawable = np.ones(32 * -(-self.size // 32), dtype=np.bool_)
        drawable[self.size :] = False
        drawable[special] = False
        drawable[list(end_token_ids)] = True
        self.drawable = _packed(drawable)
        drawable[list(self.markers.values())] = True
        self.drawable_in_calls = _packed(drawable)


class Grammar:
    """A compiled constraint. Threads may share it.

    Raises:
        InvalidConstraint: It is wrong, exceeds a limit, or no text satisfies it.
    """

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary) -> None:
        what = _WORDS[constraint.kind]
        is_calls = constraint.kind is ConstraintKind.TOOL_CALLS
        self._drawable = vocabulary.drawable_in_calls if is_calls else vocabulary.drawable
        self._rules = lark_grammar(constraint, vocabulary.markers)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # held while another start is made
        self.start = _Start(_compiled(self._rules, vocabulary))
        if self.start.state.is_error():
            found = f"{what} that cannot be compiled: {_reason(self.start.state, constraint)}"
            if is_calls:
                found = _blamed(constraint, vocabulary) or found
            raise InvalidConstraint(found, _ALLOWED[constraint.kind])
        try:
            _allowed(self.start.state.deep_copy(), self._drawable)
        except GrammarTooComplex as error:
            found = f"{what} with which no answer can begin: {error.reason}"
            raise InvalidConstraint(found, "what some text can follow, and simpler") from None

    def begin(self) -> "Matcher":
        """Return the position of an empty text."""
        return Matcher(self, self._drawable)

    def again(self, spent: "_Start", follow: Callable[["_Start"], T]) -> T:
        """Return the result for a text that a start could not follow, from another start.

        Args:
            spent: The start. It counts against its limits what all of its texts needed.
            follow: Follows the whole text from the start that it is given.

        Raises:
            GrammarTooComplex: The text exceeds a limit by itself.
        """
        with self._lock:
            if self.start is not spent:  # another text has met the same
                try:
                    return follow(self.start)
                except GrammarTooComplex:
                    pass
            fresh = _Start(_compiled(self._rules, self._vocabulary))
            result = follow(fresh)
            self.start = fresh
            return result


class _Start:
    """A compiled grammar before its texts. These share the states of its lexer, which only grow."""

    def __init__(self, state: llguidance.LLMatcher) -> None:
        self.state = state
        self._num_texts = 0
        self._lock = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether several texts began here."""
        return self._num_texts > 1

    def begin(self) -> llguidance.LLMatcher:
        """Return the position of an empty text."""
        with self._lock:
            self._num_texts += 1
        return self.state.deep_copy()


class Matcher:
    """The position of a text in a grammar. Used by one thread at a time.

    Whether the text can go on depends on it alone, not on the texts that share its start.

    Attributes:
        num_tokens: Length of the text.
    """

    def __init__(self, grammar: Grammar, drawable: TokenBits) -> None:
        self._grammar = grammar
        self._drawable = drawable
        self._token_ids: list[int] = []
        self._begin(grammar.start)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text.

        Raises:
            NotInGrammar: They do not follow the grammar.
            GrammarTooComplex: The grammar exceeded a limit.
        """
        for token_id in token_ids:
            self._work(partial(self._consume, token_id, self.num_tokens))
            self._token_ids.append(token_id)

    def allowed(self) -> TokenBits:
        """Return the tokens that may come next, at least one, newly allocated.

        Raises:
            GrammarTooComplex: The grammar exceeded a limit, or no token of the vocabulary can
                follow.
        """
        return self._work(lambda: _allowed(self._state, self._drawable))  # whichever it is then

    def _begin(self, start: _Start) -> None:
        self._start = start
        self._state = start.begin()

    def _consume(self, token_id: int, index: int) -> None:
        """Append a token to the state: the one at an index of the text."""
        if self._state.consume_token(token_id):
            return
        reason = _reason(self._state)
        if "doesn't satisfy" not in reason:
            raise GrammarTooComplex(reason)
        found = f"one that token {index} of the answer does not follow"
        raise NotInGrammar(found, "one that it follows")

    def _work(self, work: Callable[[], T]) -> T:
        """Return the result of work on the text, from another start if this one is used up."""

        def follow(start: _Start) -> T:
            self._begin(start)
            for index, token_id in enumerate(self._token_ids):
                self._consume(token_id, index)
            return work()

        try:
            return work()
        except GrammarTooComplex as error:
            if error.reason == _DEAD_END or not self._start.is_shared:
                raise
        return self._grammar.again(self._start, follow)


class _Tokens:
    """The interface that llguidance expects of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("no grammar here forces the tokenization of a text")


def _allowed(state: llguidance.LLMatcher, drawable: TokenBits) -> TokenBits:
    """Return the tokens that may come next; raises as Matcher.allowed does."""
    bits = np.zeros_like(drawable)
    state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if state.is_error():
        raise GrammarTooComplex(_reason(state))
    bits &= drawable
    if not bits.any():
        raise GrammarTooComplex(_DEAD_END)
    return bits


def _packed(tokens: np.ndarray[Any, np.dtype[np.bool_]]) -> TokenBits:
    return np.packbits(tokens, bitorder="little").view(np.int32)


def _compiled(rules: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(vocabulary.tokenizer, rules, log_level=0, limits=LIMITS)


def _blamed(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Return which function's parameters cannot be compiled, and why; empty: each alone can."""
    for name, calls in read_tool_calls(constraint.text).each_alone():
        state = _compiled(calls.rules(vocabulary.markers), vocabulary)
        if state.is_error():
            return f"parameters of {name!r} that cannot be compiled: {_reason(state)}"
    return ""


def _reason(state: llguidance.LLMatcher, constraint: Constraint | None = None) -> str:
    """Return the library's message, without the lines that repeat the grammar.

    The place in the grammar is kept only if the client wrote those lines.
    """
    if "NoExtension" in state.get_error():
        return _DEAD_END
    if _TOO_COMPLEX.search(state.get_error()):
        return "it is too complex"
    lines = [
        each
        for each in state.get_error().partition("<backtrace>")[0].splitlines()
        if not _ECHO.search(each)
    ]
    reason = _FORE_WORDS.sub("", " ".join(lines))
    if constraint is not None and constraint.kind is ConstraintKind.REGEX:
        reason = _WHOLE_REGEX.sub("", reason)
    reason = reason[:MAX_REASON_CHARS]
    place = _PLACE.match(reason)
    if place is None:
        return reason
    told = ""
    if constraint is not None and is_lark(constraint):
        told = f"in line {int(place[1]) - NUM_OWN_LINES}, column {place[2]}: "
    return told + reason[place.end() :]
