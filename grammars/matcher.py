"""Compiled grammars, and positions of texts in them: which tokens may come next.

Counts, not times, bound a grammar: every host refuses it, or ends its text with an error, at the
same place. The library releases the GIL while it works.
"""

import re
from collections.abc import Sequence
from typing import Any

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
        self._start = _compiled(lark_grammar(constraint, vocabulary.markers), vocabulary)
        if self._start.is_error():
            found = f"{what} that cannot be compiled: {_reason(self._start, constraint)}"
            if is_calls:
                found = _blamed(constraint, vocabulary) or found
            raise InvalidConstraint(found, _ALLOWED[constraint.kind])
        try:
            self.begin().allowed()
        except GrammarTooComplex as error:
            found = f"{what} with which no answer can begin: {error.reason}"
            raise InvalidConstraint(found, "what some text can follow, and simpler") from None

    def begin(self) -> "Matcher":
        """Return the position of an empty text."""
        return Matcher(self._start.deep_copy(), self._drawable)


class Matcher:
    """The position of a text in a grammar. Used by one thread at a time.

    Attributes:
        num_tokens: Length of the text.
    """

    def __init__(self, state: llguidance.LLMatcher, drawable: TokenBits) -> None:
        self._state = state
        self._drawable = drawable
        self.num_tokens = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text.

        Raises:
            NotInGrammar: They do not follow the grammar.
            GrammarTooComplex: The grammar exceeded a limit.
        """
        for token_id in token_ids:
            if not self._state.consume_token(token_id):
                reason = _reason(self._state)
                if "doesn't satisfy" not in reason:
                    raise GrammarTooComplex(reason)
                found = f"one that token {self.num_tokens} of the answer does not follow"
                raise NotInGrammar(found, "one that it follows")
            self.num_tokens += 1

    def allowed(self) -> TokenBits:
        """Return the tokens that may come next, at least one, newly allocated.

        Raises:
            GrammarTooComplex: The grammar exceeded a limit, or no token of the vocabulary can
                follow.
        """
        bits = np.zeros_like(self._drawable)
        self._state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._state.is_error():
            raise GrammarTooComplex(_reason(self._state))
        bits &= self._drawable
        if not bits.any():
            raise GrammarTooComplex("no token can follow")
        return bits


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
        return "no token can follow"
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
