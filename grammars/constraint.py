"""What an answer is held to, as a client asks for it, and its form as a grammar. Pure.

What a grammar does not say: the model's end token ends an answer where the grammar lets a text end,
and nowhere else.
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
# Nobody shall write tokens that his grammar forces others to be split into.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
NUM_OWN_LINES = _OPTIONS.count("\n")  # before those of the client
_TOKEN_REFERENCE = re.compile(r"<\[|<\|")


class ConstraintKind(Enum):
    """What an answer can be held to; the values are the fields of Constraint in common.proto."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What an answer is held to."""

    kind: ConstraintKind
    text: str = ""  # of the schema, the expression, the grammar, or the JSON of the calls
    choices: tuple[str, ...] = ()  # texts of which the answer is one

    @property
    def num_bytes(self) -> int:
        """Its size in UTF-8."""
        return sum(len(each.encode()) for each in (self.text, *self.choices))


def lark_grammar(constraint: Constraint, markers: Mapping[str, int]) -> str:
    """Return the grammar of a constraint, as llguidance reads it.

    Args:
        constraint: What is asked for.
        markers: Those of tool_calls.MARKERS that are one token of the model |-> its id.

    Raises:
        InvalidConstraint: It is wrong in a way that does not need the library to be seen.
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
    """Tell whether `lark_grammar` keeps the lines that the client wrote."""
    if constraint.kind is not ConstraintKind.GRAMMAR:
        return False
    return _of_grammar(constraint.text) == _OPTIONS + constraint.text


def _of_regex(expression: str) -> str:
    from llguidance import regex_to_lark

    if not expression:
        raise InvalidConstraint("an empty expression", "at least one character")
    # \d, \w and \s are those of ASCII, about which all readers agree.
    return f"{_OPTIONS}start: /{regex_to_lark(expression, use_ascii='dws')}/"


def _of_choices(choices: tuple[str, ...]) -> str:
    if not choices:
        raise InvalidConstraint("no texts", "at least one")
    if len(choices) > MAX_CHOICES:
        raise InvalidConstraint(f"{len(choices)} texts", f"at most {MAX_CHOICES}")
    for index, each in enumerate(choices):
        if not each:
            raise InvalidConstraint(f"an empty text at {index}", "at least one character")
    # One lexeme: alternatives of a rule would all be tried one by one.
    return f"{_OPTIONS}start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}"


def _of_grammar(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    if "%llguidance" in text:
        raise InvalidConstraint("the directive %llguidance", "rules")
    # Clients know texts, not the ids of tokens; and special tokens do not belong in an answer.
    if _TOKEN_REFERENCE.search(text):
        raise InvalidConstraint("a reference to a token, <[ or <|", "texts and expressions")
    try:
        return _OPTIONS + any_to_lark(text)
    except RecursionError:
        raise InvalidConstraint("rules nested too deeply", "fewer levels") from None
    except Exception as error:  # the converter's own, and what its bugs raise
        raise InvalidConstraint(f"no grammar: {str(error)[:300]}", "EBNF or Lark rules") from None
