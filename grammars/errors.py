"""Reasons why an answer cannot be constrained.

GrammarError
├── InvalidConstraint    the constraint is wrong, not supported, or too large
├── NotInGrammar         tokens do not follow the grammar
├── GrammarTooComplex    the grammar exceeded a limit while it matched a text
└── NoVocabulary         the model's tokenizer cannot be read, or its kind is unknown
"""


class GrammarError(Exception):
    """Base of all errors of this package.

    Attributes:
        found: The fault.
        allowed: What would be accepted.
    """

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(f"{found}; allowed: {allowed}")
        self.found = found
        self.allowed = allowed


class InvalidConstraint(GrammarError, ValueError):
    """The constraint is wrong, not supported, or too large."""


class NotInGrammar(GrammarError):
    """Tokens do not follow the grammar."""


class GrammarTooComplex(GrammarError):
    """The grammar exceeded a limit while it matched a text.

    The error does not say where in the text: that depends on the worker that notices it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"one with which an answer cannot go on: {reason}", "a simpler one")
        self.reason = reason


class NoVocabulary(GrammarError):
    """The model's tokenizer cannot be read, or its kind is unknown."""

    def __init__(self, reason: str) -> None:
        allowed = f"none: the model's tokenizer cannot serve it: {reason}"
        super().__init__("a constraint", allowed)
        self.reason = reason
