"""Reasons why an answer cannot be constrained.

GrammarError
├── InvalidConstraint    the constraint is wrong, not supported, or too large
├── NotInGrammar         tokens do not follow the grammar
├── GrammarTooComplex    the grammar exceeded a limit while it matched a text
└── NoVocabulary         the model's tokenizer cannot be read, or its kind is unknown
"""


class GrammarError(Exception):
    """Base of all errors of this package."""


class InvalidConstraint(GrammarError, ValueError):
    """The constraint is wrong, not supported, or too large.

    Attributes:
        found: The fault.
        allowed: What would be accepted.
    """

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(f"{found}; allowed: {allowed}")
        self.found = found
        self.allowed = allowed


class NotInGrammar(GrammarError):
    """Tokens do not follow the grammar."""


class GrammarTooComplex(GrammarError):
    """The grammar exceeded a limit while it matched a text."""


class NoVocabulary(GrammarError):
    """The model's tokenizer cannot be read, or its kind is unknown."""
