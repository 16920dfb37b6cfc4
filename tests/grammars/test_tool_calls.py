"""Answers held to calls are calls: the gateway reads them, their arguments follow the schema."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammars.constraint import Constraint, ConstraintKind
from grammars.errors import InvalidConstraint
from grammars.matcher import Grammar, Vocabulary
from grammars.tool_calls import FORMATS, MARKERS, MAX_CALLS, MAX_FUNCTIONS
from grammars.vocabulary import ModelTokens
from tests.http_gateway.answer_texts import read
from tests.support.grammar_cases import PARAMETERS
from tests.support.token_bits import token_ids

END = 256
BYTES = [*(bytes([byte]) for byte in range(256)), b"", b'{"', b'": ', b'"}', b"name"]
FIRST_MARKER = len(BYTES)
MARKER_IDS = {text: FIRST_MARKER + index for index, text in enumerate(MARKERS)}
TEXTS = [*BYTES, *(text.encode() for text in MARKERS)]  # as a client sees them
VOCABULARIES = {
    "marker-tokens": Vocabulary(ModelTokens([*BYTES, *[b""] * len(MARKERS)], MARKER_IDS), [END]),
    "no-marker-tokens": Vocabulary(ModelTokens(BYTES, {}), [END]),
}
NAMES = st.text("abYZ_-.:9", min_size=1, max_size=5)
FUNCTIONS = st.dictionaries(NAMES, st.none() | PARAMETERS, min_size=1, max_size=3)
NO_ARGUMENTS = {"type": "object", "maxProperties": 0}


def calls(functions: dict[str, Any], form: str = "hermes", is_parallel: bool = True) -> Constraint:
    shown = [{"name": name, "parameters": schema} for name, schema in functions.items()]
    text = {"format": form, "functions": shown, "is_parallel": is_parallel}
    return Constraint(kind=ConstraintKind.TOOL_CALLS, text=json.dumps(text))


def draw(
    constraint: Constraint, vocabulary: Vocabulary, rng: random.Random, max_tokens: int = 2000
) -> list[int]:
    """Return the tokens of a random text, which ends where it first may; [] if it was cut off."""
    matcher = Grammar(constraint, vocabulary).begin()
    drawn: list[int] = []
    while len(drawn) < max_tokens:
        allowed = list(token_ids(matcher.allowed()))
        if END in allowed and rng.random() < 0.5:
            return drawn
        token_id = rng.choice([each for each in allowed if each != END] or [END])
        if token_id == END:
            return drawn
        matcher.accept([token_id])
        drawn.append(token_id)
    return []


def text_of(drawn: list[int]) -> str:
    return b"".join(TEXTS[each] for each in drawn).decode()


def check_random_calls(
    functions: dict[str, Any], form: str, kind: str, is_parallel: bool, seed: int
) -> None:
    rng = random.Random(seed)
    drawn = draw(calls(functions, form, is_parallel), VOCABULARIES[kind], rng)

    text = text_of(drawn)
    cuts = rng.sample(range(len(text) + 1), min(5, len(text)))
    thought, content, made = read(text, form, cuts=cuts, tools=functions)

    assert (thought, content) == ("", "")
    if drawn:
        assert 1 <= len(made) <= (MAX_CALLS if is_parallel and form != "llama3_json" else 1)
    for name, arguments in made:
        schema = functions[name] or NO_ARGUMENTS
        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))


RANDOM = {
    "functions": FUNCTIONS,
    "form": st.sampled_from(FORMATS),
    "kind": st.sampled_from(sorted(VOCABULARIES)),
    "is_parallel": st.booleans(),
    "seed": st.integers(0, 2**32),
}


@given(**RANDOM)
@settings(max_examples=200)
def test_random_answers_are_calls_that_follow_their_schemas(**case: Any) -> None:
    check_random_calls(**case)


@pytest.mark.thorough
@given(**RANDOM)
@settings(max_examples=6_000)
def test_many_random_answers_are_calls_that_follow_their_schemas(**case: Any) -> None:
    check_random_calls(**case)


WRITTEN = {  # as the templates of each format teach it
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    "llama3_json": ('{"name": "f", "parameters": {"a": 1}}', ""),
    "mistral": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}',
        ', {"name": "g", "arguments": {}}]',
    ),
    "mistral-args": ('[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]g[ARGS]{}"),
}


def spelled(text: str, markers: dict[str, int]) -> list[int]:
    """Return the tokens of a text, whose markers are single tokens."""
    drawn: list[int] = []
    while text:
        found = next((each for each in markers if text.startswith(each)), None)
        drawn += [markers[found]] if found else text[0].encode()
        text = text[len(found or text[0]) :]
    return drawn


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_are_written_as_the_template_teaches_them(case: str) -> None:
    form = case.removesuffix("-args")
    has_markers = case != "mistral"  # with [ARGS] as a token the model knows the newer format
    vocabulary = VOCABULARIES["marker-tokens" if has_markers else "no-marker-tokens"]
    markers = MARKER_IDS if has_markers else {}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    one, more = WRITTEN[case]
    matcher = Grammar(calls({"f": schema, "g": None}, form), vocabulary).begin()

    matcher.accept(spelled(one, markers))
    matcher.accept(spelled(more, markers))

    assert END in token_ids(matcher.allowed())


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_cannot_end_before_its_first_call(form: str) -> None:
    matcher = Grammar(calls({"f": None}, form), VOCABULARIES["marker-tokens"]).begin()

    first = set(token_ids(matcher.allowed()))

    marker = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(form)
    assert first == ({MARKER_IDS[marker]} if marker else {ord("{"), BYTES.index(b'{"')})


def test_markers_are_drawn_in_calls_alone() -> None:
    anything = Constraint(kind=ConstraintKind.REGEX, text="(.|\n)*")
    matcher = Grammar(anything, VOCABULARIES["marker-tokens"]).begin()

    assert not set(token_ids(matcher.allowed())) & set(MARKER_IDS.values())


def test_with_one_call_asked_for_none_follows_it() -> None:
    alone = Grammar(calls({"f": None}, is_parallel=False), VOCABULARIES["marker-tokens"]).begin()
    one = spelled('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', MARKER_IDS)

    alone.accept(one)

    assert list(token_ids(alone.allowed())) == [END]


def test_calls_have_an_end() -> None:
    vocabulary = VOCABULARIES["marker-tokens"]
    matcher = Grammar(calls({"f": None}, "mistral"), vocabulary).begin()
    one = spelled("[TOOL_CALLS]f[ARGS]{}", MARKER_IDS)

    matcher.accept(one * MAX_CALLS)

    assert list(token_ids(matcher.allowed())) == [END]


def changed(**fields: Any) -> str:
    right = {"format": "hermes", "functions": [{"name": "f"}], "is_parallel": True}
    return json.dumps(right | fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "that is not JSON"),
        ("[]", "an array"),
        (changed(extra=1), "the key 'extra'"),
        (changed(**{"x" * 60_000: 1}), "the key 'xxx"),
        (changed(format="xml"), "format 'xml'.*hermes, llama3_json, mistral"),
        (changed(format=None), "format null"),
        (changed(is_parallel="yes"), "is_parallel"),
        (changed(functions={}), "an array of 1 to"),
        (changed(functions=[]), "0 functions"),
        (
            changed(functions=[{"name": "f"}] * (MAX_FUNCTIONS + 1)),
            f"{MAX_FUNCTIONS + 1} functions",
        ),
        (changed(functions=["f"]), r"functions\[0\]"),
        (changed(functions=[{"name": "f"}, {"name": "a b"}]), r"functions\[1\].name 'a b'"),
        (changed(functions=[{"name": 'f"'}]), r"functions\[0\].name"),
        (changed(functions=[{"name": [True]}]), r"functions\[0\].name \[true\]"),
        (changed(functions=[{"name": "é"}]), r"functions\[0\].name"),
        (changed(functions=[{"name": "f" * 129}]), r"functions\[0\].name"),
        (changed(functions=[{"name": "f", "parameters": []}]), "parameters of 'f'.*an array"),
        (
            changed(functions=[{"name": "f", "parameters": True}]),
            "parameters of 'f'.*not an object",
        ),
        (
            changed(functions=[{"name": "f", "parameters": {"type": "array"}}]),
            "parameters of 'f'.*not an object",
        ),
        (
            changed(functions=[{"name": "f", "parameters": {"x-guidance": {}}}]),
            "parameters of 'f'.*x-guidance",
        ),
        (
            changed(
                functions=[
                    {"name": "f"},
                    {"name": "g", "parameters": {"properties": {"a": {"not": {}}}}},
                ]
            ),
            "parameters of 'g'.*not",
        ),
        (
            changed(functions=[{"name": "g", "parameters": {"$ref": "https://example.com/s"}}]),
            "parameters of 'g'.*example.com",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_function(text: str, words: str) -> None:
    constraint = Constraint(kind=ConstraintKind.TOOL_CALLS, text=text)

    with pytest.raises(InvalidConstraint, match=words) as caught:
        Grammar(constraint, VOCABULARIES["marker-tokens"])

    assert len(str(caught.value)) < 1000
