"""Which tokens may come next: exactly those that begin, go on or end a text of the language."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammars.constraint import MAX_BYTES, MAX_CHOICES, Constraint, ConstraintKind
from grammars.errors import GrammarTooComplex, InvalidConstraint, NotInGrammar
from grammars.matcher import Grammar, Matcher, Vocabulary
from grammars.vocabulary import ModelTokens
from tests.support.grammar_cases import (
    CONSTRAINTS,
    GRAMMARS,
    JSON_OBJECT,
    choice,
    follows,
    grammar,
    json_schema,
    regex,
)
from tests.support.token_bits import token_ids

END, OTHER_END, SPECIAL = 256, 257, 258
PIECES = [b"ab", b"abc", b"bc", b'{"', b'": ', b"12", b"\xc3\xa9", b"true", b", ", b"  "]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"", b"", *PIECES]
PADDED = [*TOKENS, *[b""] * 11]  # ids that only pad the logits
VOCABULARY = Vocabulary(ModelTokens(PADDED, {}), [END, OTHER_END])


def allowed(matcher: Matcher) -> set[int]:
    return set(token_ids(matcher.allowed()))


def start(constraint: Constraint) -> Matcher:
    return Grammar(constraint, VOCABULARY).begin()


TEMPERATURE = 1.5


def hot_draw(matcher: Matcher, logits: Any) -> int:
    """Draw at the temperature from random logits, of the tokens that the matcher allows."""
    mask = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")[: len(PADDED)]
    held = np.where(mask, logits.normal(0, 3, len(PADDED)) / TEMPERATURE, -np.inf)
    return int((held + logits.gumbel(size=len(PADDED))).argmax())


def random_text(constraint: Constraint, rng: random.Random, max_tokens: int = 400) -> str | None:
    """Draw tokens of a random model; None: cut off."""
    matcher = start(constraint)
    logits = np.random.default_rng(rng.randrange(2**32))
    drawn: list[int] = []
    while len(drawn) < max_tokens:
        token_id = hot_draw(matcher, logits)
        if token_id in (END, OTHER_END):
            return b"".join(TOKENS[each] for each in drawn).decode()
        assert TOKENS[token_id], "a token without text was allowed"
        matcher.accept([token_id])
        drawn.append(token_id)
    return None


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (choice("abc", "b", "bcab"), {"abc", "b", "bcab"}),
        (regex("ab?(c|12)?"), {"a", "ab", "ac", "abc", "a12", "ab12"}),
        (grammar('root ::= "a" b?\nb ::= "bc" | "12"'), {"a", "abc", "a12"}),
        (grammar('start: "a" b?\nb: "bc" | "12"'), {"a", "abc", "a12"}),
        (json_schema({"enum": [12, True, "é"]}), {"12", "true", '"é"'}),
    ],
    ids=["choice", "regex", "ebnf", "lark", "enum"],
)
def test_after_each_beginning_exactly_the_tokens_that_go_on_are_allowed(
    constraint: Constraint, texts: set[str]
) -> None:
    language = {text.encode() for text in texts}
    beginnings = {text[:length] for text in language for length in range(len(text) + 1)}

    for beginning in beginnings:
        matcher = start(constraint)
        matcher.accept(list(beginning))
        going_on = {
            token_id
            for token_id, token in enumerate(TOKENS)
            if token and beginning + token in beginnings
        }
        ends = {END, OTHER_END} if beginning in language else set()
        assert allowed(matcher) == going_on | ends, beginning


@given(constraint=CONSTRAINTS, seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_random_texts_follow_random_constraints(constraint: Constraint, seed: int) -> None:
    _check_random_texts(constraint, seed)


@pytest.mark.thorough
@given(constraint=CONSTRAINTS, seed=st.integers(0, 2**32))
@settings(max_examples=6_000)
def test_many_random_texts_follow_random_constraints(constraint: Constraint, seed: int) -> None:
    _check_random_texts(constraint, seed)


def _check_random_texts(constraint: Constraint, seed: int) -> None:
    rng = random.Random(seed)
    texts = [random_text(constraint, rng) for _ in range(4)]
    assert all(text is None or follows(text, constraint) for text in texts)


@pytest.mark.parametrize("rules", sorted(GRAMMARS))
def test_random_texts_follow_grammars_as_their_judges_see_it(rules: str) -> None:
    rng = random.Random(rules)
    texts = [random_text(grammar(rules), rng, max_tokens=60) for _ in range(40)]
    ended = {text for text in texts if text is not None}

    assert len(ended) > 3
    for text in ended:
        assert GRAMMARS[rules](text)
        assert not GRAMMARS[rules](text + ")"), "the judge accepts everything"


def test_most_random_texts_come_to_an_end() -> None:
    rng = random.Random(0)
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}
    schema |= {"additionalProperties": False}

    texts = [random_text(json_schema(schema), rng) for _ in range(200)]

    assert texts.count(None) == 0
    assert len(set(texts)) > 100


def test_a_text_that_is_read_again_allows_what_it_allowed_the_first_time() -> None:
    rng = random.Random(1)
    first, drawn = start(JSON_OBJECT), []
    for _ in range(60):
        token_id = rng.choice(sorted(allowed(first) - {END, OTHER_END}) or [END])
        if token_id == END:
            break
        drawn.append(token_id)
        first.accept([token_id])
        again = start(JSON_OBJECT)
        again.accept(drawn)
        assert allowed(again) == allowed(first)
    assert len(drawn) > 5


def test_matchers_of_one_grammar_do_not_know_each_other() -> None:
    both = Grammar(choice("ab", "12"), VOCABULARY)
    one, other = both.begin(), both.begin()

    one.accept(b"a")
    other.accept(b"1")

    assert allowed(one) == {ord("b")}
    assert allowed(other) == {ord("2")}


def random_names(count: int, num_chars: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices("abcdefghij", k=num_chars)) for _ in range(count)]


@pytest.mark.parametrize("as_schema", [False, True], ids=["choice", "schema"])
def test_answers_do_not_use_up_the_grammar_of_later_ones(as_schema: bool) -> None:
    names = random_names(1000, 60)
    shared = Grammar(json_schema({"enum": names}) if as_schema else choice(*names), VOCABULARY)
    early = shared.begin()
    texts = [json.dumps(name) if as_schema else name for name in names]
    early.accept(texts[0][:30].encode())

    for text in texts:
        matcher = shared.begin()
        for byte in text.encode():
            assert byte in allowed(matcher)
            matcher.accept([byte])
        assert END in allowed(matcher)
    assert allowed(early) == {texts[0].encode()[30]}, "what began earlier has lost its place"
    early.accept(texts[0][30:].encode())
    assert END in allowed(early)


def test_a_text_that_takes_too_much_by_itself_ends_in_the_same_place_after_any_others() -> None:
    expression = regex(".*(a|b.).{14}")
    rng = random.Random(2)
    texts = [bytes(rng.choices(b"abc", k=3000)) for _ in range(3)]

    def follow(text: bytes, matcher: Matcher) -> None:
        for byte in text:
            matcher.allowed()
            matcher.accept([byte])

    def end_of(text: bytes, grammar: Grammar) -> int:
        matcher = grammar.begin()
        with pytest.raises(GrammarTooComplex):
            follow(text, matcher)
        return matcher.num_tokens

    shared = Grammar(expression, VOCABULARY)
    together = [end_of(text, shared) for text in texts]

    assert together == [end_of(text, Grammar(expression, VOCABULARY)) for text in texts]


@pytest.mark.parametrize("tokens", [b"x", b"ac", [SPECIAL], [END], [len(PADDED) - 1]])
def test_tokens_outside_the_grammar_are_told(tokens: list[int]) -> None:
    matcher = start(choice("ab", "abc"))

    with pytest.raises(NotInGrammar, match=r"token [01] of the answer"):
        matcher.accept(list(tokens))


def union(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    inner = [{"type": "object", "properties": {"k": union(depth - 1)}} for _ in range(4)]
    return {"anyOf": [each | {"required": ["k"]} for each in inner]}


def nested(depth: int) -> Any:
    return {"items": nested(depth - 1)} if depth else {"type": "null"}


HOSTILE = {
    "remote-reference": (json_schema({"$ref": "https://example.com/s"}), "example.com"),
    "missing-reference": (json_schema({"$ref": "#/$defs/a"}), "defs"),
    "endless": (json_schema({"$ref": "#"}), "no token can follow"),
    "unique-items": (json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not": (json_schema({"not": {"type": "null"}}), '"not"'),
    "conditional": (json_schema({"if": {"type": "null"}}), '"if"'),
    "unknown-format": (json_schema({"type": "string", "format": "colour"}), "colour"),
    "look-ahead-within": (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    "overlapping-one-of": (
        json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        "oneOf",
    ),
    "unsatisfiable": (json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
    "wide-pattern": (
        json_schema({"type": "string", "pattern": "(x.{40}){20}", "minLength": 500}),
        "compiled: it is too complex; ",
    ),
    "false": (json_schema(False), "false"),
    "array": (json_schema([]), "an array"),
    "extension": (json_schema({"x-guidance": {"lenient": True}}), "x-guidance"),
    "deep": (json_schema(nested(100)), "nested too deeply"),
    "wide-union": (json_schema(union(6)), "bytes|too|many|items"),
    "large": (json_schema({"description": "x" * MAX_BYTES}), f"at most {MAX_BYTES} bytes"),
    "look-ahead": (regex("(?=a)b"), "look-around"),
    "back-reference": (regex(r"(a)\1"), "backreferences"),
    "unclosed": (regex("(a"), "unclosed group"),
    "half-an-escape": (regex("ab\\"), "ends with a backslash"),
    "three-backslashes": (regex("ab" + 3 * "\\"), "ends with a backslash"),
    "nothing": (regex(""), "empty"),
    "no-text": (regex(r"[^\s\S]"), "no token can follow"),
    "nested-groups": (regex("(" * 5000 + "a" + ")" * 5000), "nest"),
    "no-choices": (choice(), "no texts"),
    "empty-choice": (choice("a", ""), "an empty text at 1"),
    "many-choices": (choice(*map(str, range(MAX_CHOICES + 1))), f"at most {MAX_CHOICES}"),
    "no-grammar": (grammar("hello"), "a grammar that cannot be read: "),
    "directive": (grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "directive"),
    "token-by-name": (grammar("start: <|end|>"), "a reference to a token"),
    "token-by-number": (grammar("start: <[256]>"), "a reference to a token"),
    "nested-rules": (grammar("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "deeply"),
    "ambiguous": (
        grammar("start: " + " ".join(["a*"] * 600) + '\na: "a" | "b"'),
        "items|too|complex",
    ),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_cannot_be_served_is_refused_with_a_reason(case: tuple[Constraint, str]) -> None:
    constraint, reason = case

    with pytest.raises(InvalidConstraint) as caught:
        Grammar(constraint, VOCABULARY)

    assert re.search(reason, str(caught.value))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("rules", "token"),
    [
        ('start: start start start | "a"', b"a"),
        ('start: "a"* start "b" | "a"* start | "a"', b"a"),
        ("start: /((a{1,300} ?){1,300}b?){1,300}/", b"a"),
    ],
    ids=["cubic", "ambiguous", "repetitions"],
)
def test_a_text_whose_grammar_takes_ever_more_ends_with_an_error(rules: str, token: bytes) -> None:
    def write() -> None:
        matcher = start(grammar(rules))
        for _ in range(5000):
            matcher.accept(list(token))
            matcher.allowed()

    with pytest.raises((GrammarTooComplex, InvalidConstraint)):
        write()


UNREAD = "a grammar that cannot be compiled: "


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        (
            "JSON_SCHEMA",
            '{"not": {}}',
            'a schema that cannot be compiled: Unimplemented keys: ["not"]',
        ),
        ("REGEX", "(", "an expression that cannot be compiled: unclosed group"),
        ("GRAMMAR", 'start: a\na: ("b"\n', f"{UNREAD}in line 2, column 8: Expected token ')'"),
        ("GRAMMAR", "start: a b\na: /x/\n", f'{UNREAD}in line 1, column 8: unknown name: "b"'),
        (
            "GRAMMAR",
            "root ::= [z-a]",
            f"{UNREAD}invalid regex",
        ),  # its lines are not those that are read
    ],
)
def test_what_is_wrong_is_told_with_its_place_in_what_the_client_wrote(
    kind: str, text: str, found: str
) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        start(Constraint(kind=ConstraintKind[kind], text=text))
    assert caught.value.found.startswith(found)


def test_what_people_write_is_served() -> None:
    person = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "as in a passport"},
            "born": {"type": "string", "format": "date"},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}},
            "size": {"anyOf": [{"type": "number", "multipleOf": 0.5}, {"type": "null"}]},
        },
        "required": ["name", "born"],
        "additionalProperties": False,
        "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    texts = [
        '{"name": "A \\"B\\" é", "born": "1999-12-31"}',
        '{\n  "name": "x",\n  "born": "2000-02-29",\n  "friends": [{"name": "y"}, {}]\n}',
        '{"name":"","born":"1900-01-01","size":1.5}',
    ]

    for text in texts:
        matcher = start(json_schema(person))
        matcher.accept(list(text.encode()))
        assert END in allowed(matcher)
        assert follows(text, json_schema(person))
    wrong = ['{"born"', '{"name": "x", "born": "1999-13', '{"name": 1', "[", '{"name": "x"}']
    for text in wrong:
        with pytest.raises(NotInGrammar):
            start(json_schema(person)).accept(list(text.encode()))


def test_blanks_between_values_are_bounded() -> None:
    matcher = start(JSON_OBJECT)

    matcher.accept(list(b"{" + b" " * 40))

    assert all(TOKENS[each].strip() for each in allowed(matcher))
    assert json.loads("{" + " " * 40 + "}") == {}


def test_a_vocabulary_that_cannot_go_on_is_told() -> None:
    only_a = Vocabulary(ModelTokens([b"a", b""], {}), [1])

    with pytest.raises(InvalidConstraint, match="no token can follow"):
        Grammar(choice("b"), only_a)
