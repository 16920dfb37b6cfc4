"""Why an answer cannot be held to a form.

GrammarError
├── InvalidConstraint    what is asked for is wrong, not supported, or too large
├── NotInGrammar         tokens that do not follow the grammar
├── GrammarTooComplex    it passed a limit while a text was matched
└── NoVocabulary         the model's tokenizer cannot be read, or is of a kind that is not known
"""


class GrammarError(Exception):
    """Base of all errors of this package."""


class InvalidConstraint(GrammarError, ValueError):
    """What is asked for is wrong, not supported, or too large.

    Attributes:
        found: What is wrong.
        allowed: What would be right.
    """

    def __init__(self, found: str, allowed: str) -> None:
        super().__init__(f"{found}; allowed: {allowed}")
        self.found = found
        self.allowed = allowed


class NotInGrammar(GrammarError):
    """Tokens that do not follow the grammar."""


class GrammarTooComplex(GrammarError):
    """It passed a limit while a text was matched."""


class NoVocabulary(GrammarError):
    """The model's tokenizer cannot be read, or is of a kind that is not known."""
