"""Constraints for tests, and whether a text satisfies them, as other libraries judge it."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
from hypothesis import strategies as st

from grammars.constraint import Constraint, ConstraintKind

PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=6)
NAMES = st.text('abcdefghij_é" ', min_size=1, max_size=4)
INTEGERS = st.integers(-50, 2000)


def json_schema(schema: Any) -> Constraint:
    """Return the constraint of a schema."""
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=json.dumps(schema))


def regex(expression: str) -> Constraint:
    """Return the constraint of an expression."""
    return Constraint(kind=ConstraintKind.REGEX, text=expression)


def choice(*texts: str) -> Constraint:
    """Return the constraint of some texts."""
    return Constraint(kind=ConstraintKind.CHOICE, choices=texts)


def grammar(rules: str) -> Constraint:
    """Return the constraint of a grammar."""
    return Constraint(kind=ConstraintKind.GRAMMAR, text=rules)


def _is_nested(text: str) -> bool:
    """Tell whether parentheses and brackets match; between them stand letters."""
    opened: list[str] = []
    for each in text:
        if each in "([":
            opened.append({"(": ")", "[": "]"}[each])
        elif each in ")]":
            if not opened or opened.pop() != each:
                return False
        elif each not in "ab":
            return False
    return bool(text) and not opened


def _is_sum(text: str) -> bool:
    """Tell whether a text is a sum of products of digits and bracketed sums, by descent."""

    def factor(at: int) -> int:
        if text[at : at + 1] == "(":
            end = sums(at + 1)
            return end + 1 if end > 0 and text[end : end + 1] == ")" else -1
        return at + 1 if text[at : at + 1] in ("0", "1", "2") else -1

    def chain(part: Callable[[int], int], sign: str, at: int) -> int:
        end = part(at)
        while end > 0 and text[end : end + 1] == sign:
            end = part(end + 1)
        return end

    def sums(at: int) -> int:
        return chain(lambda each: chain(factor, "*", each), "+", at)

    return sums(0) == len(text)


def _mirrors(text: str) -> bool:
    """Tell whether a text is a palindrome of a and b around a bar."""
    left, bar, right = text.partition("|")
    return bar == "|" and set(left) <= {"a", "b"} and right == left[::-1]


# Rules |-> an independent judge of whole texts
GRAMMARS: dict[str, Callable[[str], bool]] = {
    'root ::= part+\npart ::= [ab] | "(" part* ")" | "[" part* "]"': _is_nested,
    'start: part+\npart: /[ab]/ | "(" part* ")" | "[" part* "]"': _is_nested,
    'root ::= term ("+" term)*\nterm ::= factor ("*" factor)*\n'
    'factor ::= [0-2] | "(" root ")"': _is_sum,
    'start: "a" start "a" | "b" start "b" | "|"': _mirrors,
}
JSON_OBJECT = Constraint(kind=ConstraintKind.JSON_OBJECT)


def follows(text: str, constraint: Constraint) -> bool:
    """Tell whether a whole text follows a constraint; of grammars, those of GRAMMARS."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return isinstance(json.loads(text), dict)
        case ConstraintKind.JSON_SCHEMA:
            schema = json.loads(constraint.text)
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            return True
        case ConstraintKind.REGEX:
            return re.fullmatch(constraint.text, text) is not None
        case ConstraintKind.CHOICE:
            return text in constraint.choices
        case ConstraintKind.GRAMMAR:
            return GRAMMARS[constraint.text](text)
        case _:
            raise NotImplementedError


def _strings() -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": sum(pair)}
    )
    pattern = st.sampled_from(["^[a-c]{1,3}$", "^x?y+z{0,2}$", '^(ab|cd)?"?$']).map(
        lambda each: {"type": "string", "pattern": each}
    )
    form = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(
        lambda each: {"type": "string", "format": each}
    )
    return st.one_of(bounded, pattern, form)


def _numbers() -> st.SearchStrategy[dict[str, Any]]:
    ranged = st.tuples(INTEGERS, st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    )
    real = st.tuples(INTEGERS, st.integers(1, 300)).map(
        lambda pair: {"type": "number", "exclusiveMinimum": pair[0], "maximum": sum(pair)}
    )
    return st.one_of(ranged, real, st.just({"type": "boolean"}), st.just({"type": "null"}))


def _values() -> st.SearchStrategy[dict[str, Any]]:
    value = st.one_of(st.none(), st.booleans(), INTEGERS, PRINTABLE)
    values = st.lists(value, min_size=1, max_size=3, unique_by=repr)
    return st.one_of(
        value.map(lambda each: {"const": each}), values.map(lambda each: {"enum": each})
    )


def _arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(items, st.integers(0, 2), st.integers(0, 2)).map(
        lambda each: {
            "type": "array",
            "items": each[0],
            "minItems": each[1],
            "maxItems": each[1] + each[2],
        }
    )


@st.composite
def _objects(draw: st.DrawFn, items: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, items, max_size=3))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


# Each has a bounded number of short texts, so that a random model comes to an end.
SCHEMAS = st.recursive(
    st.one_of(_strings(), _numbers(), _values()),
    lambda inner: st.one_of(
        _arrays(inner),
        _objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=4,
)
# Of the arguments of functions; texts in them may look like the marks around calls.
PARAMETERS = _objects(
    st.one_of(SCHEMAS, st.just({"enum": ["</tool_call>", "[ARGS]{", "[TOOL_CALLS]", '"}}]']}))
)
EXPRESSIONS = st.recursive(
    st.one_of(
        st.sampled_from(["a", "b", "ü", r"\d", r"[x-z]", r"[^a-y\n]", r"\.", r"\"", " ", "/"]),
        PRINTABLE.map(re.escape),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{0,3}", "{2}", "{1,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)
CONSTRAINTS = st.one_of(
    SCHEMAS.map(json_schema),
    EXPRESSIONS.map(regex),
    st.lists(PRINTABLE, min_size=1, max_size=5).map(lambda texts: choice(*texts)),
    st.sampled_from(sorted(GRAMMARS)).map(grammar),
)
