"""The constraint of an answer, as a client requests it, and its grammar. Pure.

Not part of the grammar: the model's end token ends an answer where the grammar allows a text to
end, and nowhere else.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from grammars.errors import InvalidConstraint
from grammars.json_schema import check_schema, json_rule, read_json
from grammars.tool_calls import read_tool_calls

MAX_BYTES = 1 << 16  # of a schema, an expression, a grammar, or of all choices together
MAX_CHOICES = 1000
# The grammar must not force tokens that split a text differently than the tokenizer would.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
NUM_OWN_LINES = _OPTIONS.count("\n")  # lines before the client's
_TOKEN_REFERENCE = re.compile(r"<\[|<\|")


class ConstraintKind(Enum):
    """Kinds of constraints; the values are the fields of Constraint in common.proto."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """The form that an answer must take."""

    kind: ConstraintKind
    text: str = ""  # of the schema, the expression or the grammar, or the JSON of the calls
    choices: tuple[str, ...] = ()  # texts, one of which is the answer

    @property
    def num_bytes(self) -> int:
        """Its size in UTF-8."""
        return sum(len(each.encode()) for each in (self.text, *self.choices))


def lark_grammar(constraint: Constraint, markers: Mapping[str, int]) -> str:
    """Return the grammar of a constraint in the syntax of llguidance.

    Args:
        constraint: From the request.
        markers: The markers of tool_calls.MARKERS that are one token of the model |-> its id.

    Raises:
        InvalidConstraint: It has a fault that can be found without the library.
    """
    if constraint.num_bytes > MAX_BYTES:
        raise InvalidConstraint(f"{constraint.num_bytes} bytes", f"at most {MAX_BYTES} bytes")
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _OPTIONS + "start: " + json_rule({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            schema = check_schema(read_json(constraint.text, "a JSON schema"))
            return _OPTIONS + "start: " + json_rule(schema)
        case ConstraintKind.REGEX:
            return _of_regex(constraint.text)
        case ConstraintKind.CHOICE:
            return _of_choices(constraint.choices)
        case ConstraintKind.GRAMMAR:
            return _of_grammar(constraint.text)
        case ConstraintKind.TOOL_CALLS:
            return _OPTIONS + read_tool_calls(constraint.text).rules(markers)


def is_lark(constraint: Constraint) -> bool:
    """Return whether `lark_grammar` keeps the client's lines."""
    if constraint.kind is not ConstraintKind.GRAMMAR:
        return False
    return _of_grammar(constraint.text) == _OPTIONS + constraint.text


def _of_regex(expression: str) -> str:
    from llguidance import regex_to_lark

    if not expression:
        raise InvalidConstraint("an empty expression", "at least one character")
    if (len(expression) - len(expression.rstrip("\\"))) % 2:  # the converter would drop it
        raise InvalidConstraint("an expression that ends with a backslash", "whole escapes")
    # \d, \w and \s match ASCII only, on which all dialects agree.
    return f"{_OPTIONS}start: /{regex_to_lark(expression, use_ascii='dws')}/"


def _of_choices(choices: tuple[str, ...]) -> str:
    if not choices:
        raise InvalidConstraint("no texts", "at least one")
    if len(choices) > MAX_CHOICES:
        raise InvalidConstraint(f"{len(choices)} texts", f"at most {MAX_CHOICES}")
    for index, each in enumerate(choices):
        if not each:
            raise InvalidConstraint(f"an empty text at {index}", "at least one character")
    # One lexeme: the parser would try alternatives of a rule one by one.
    return f"{_OPTIONS}start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}"


def _of_grammar(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if "%llguidance" in text:
        raise InvalidConstraint("the directive %llguidance", "rules")
    # Clients know texts, not token ids; and special tokens do not belong in an answer.
    if _TOKEN_REFERENCE.search(text):
        raise InvalidConstraint("a reference to a token, <[ or <|", "texts and expressions")
    try:
        return _OPTIONS + any_to_lark(text)
    except RecursionError:
        raise InvalidConstraint("rules nested too deeply", "fewer levels") from None
    except Exception as error:  # the converter's own, and those of its bugs
        found = f"a grammar that cannot be read: {str(error)[:300]}"
        raise InvalidConstraint(found, "EBNF or Lark rules") from None
