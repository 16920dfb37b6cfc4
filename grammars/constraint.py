"""What an answer is held to, as a client asks for it, and its form as a grammar. Pure.

What a grammar does not say: the model's end token ends an answer where the grammar lets a text end,
and nowhere else.
"""

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from grammars.errors import InvalidConstraint

MAX_BYTES = 1 << 16  # of a schema, an expression, a grammar, or of all choices together
MAX_CHOICES = 1000
MAX_DEPTH = 64  # of values within values
# Between the parts of a JSON text. Without an end, a model may write blanks for ever.
WHITESPACE = r"[ \t\n\r]{0,40}"
# Nobody shall write tokens that his grammar forces others to be split into.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
NUM_OWN_LINES = _OPTIONS.count("\n")  # before those of the client
_TOKEN_REFERENCE = re.compile(r"<\[|<\|")
_EXTENSIONS = ("x-guidance",)  # keys of a schema by which the library would change its rules


class ConstraintKind(Enum):
    """What an answer can be held to; the values are the fields of Constraint in common.proto."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What an answer is held to."""

    kind: ConstraintKind
    text: str = ""  # of the schema, the expression or the grammar
    choices: tuple[str, ...] = ()  # texts of which the answer is one

    @property
    def num_bytes(self) -> int:
        """Its size in UTF-8."""
        return sum(len(each.encode()) for each in (self.text, *self.choices))


def lark_grammar(constraint: Constraint) -> str:
    """Return the grammar of a constraint, as llguidance reads it.

    Raises:
        InvalidConstraint: It is wrong in a way that does not need the library to be seen.
    """
    if constraint.num_bytes > MAX_BYTES:
        raise InvalidConstraint(f"{constraint.num_bytes} bytes", f"at most {MAX_BYTES} bytes")
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(_read_schema(constraint.text))
        case ConstraintKind.REGEX:
            return _of_regex(constraint.text)
        case ConstraintKind.CHOICE:
            return _of_choices(constraint.choices)
        case ConstraintKind.GRAMMAR:
            return _of_grammar(constraint.text)


def is_lark(constraint: Constraint) -> bool:
    """Tell whether `lark_grammar` keeps the lines that the client wrote."""
    if constraint.kind is not ConstraintKind.GRAMMAR:
        return False
    return lark_grammar(constraint) == _OPTIONS + constraint.text


def _of_schema(schema: Any) -> str:
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"{_OPTIONS}start: %json {json.dumps(schema)}"


def _read_schema(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidConstraint("values nested too deeply", f"{MAX_DEPTH} levels") from None
    except ValueError as error:
        raise InvalidConstraint(f"no JSON: {error}", "a JSON schema") from None
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint(f"a {type(schema).__name__}", "a JSON schema, which is an object")
    if isinstance(schema, dict):
        for key in _EXTENSIONS:
            if key in schema:
                raise InvalidConstraint(f"the key {key!r}", "keywords of JSON Schema")
    _check_depth(schema)
    return schema


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level := [each for value in level for each in _items(value)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidConstraint("values nested too deeply", f"at most {MAX_DEPTH} levels")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


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
    # The end would be allowed beside such a token, and nothing says what text it stands for.
    if _TOKEN_REFERENCE.search(text):
        raise InvalidConstraint("a reference to a token, <[ or <|", "texts and expressions")
    try:
        return _OPTIONS + any_to_lark(text)
    except RecursionError:
        raise InvalidConstraint("rules nested too deeply", "fewer levels") from None
    except Exception as error:  # the converter's own, and what its bugs raise
        raise InvalidConstraint(f"no grammar: {str(error)[:300]}", "EBNF or Lark rules") from None
