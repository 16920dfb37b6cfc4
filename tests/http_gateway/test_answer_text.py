"""Reasoning and calls of tools are read out of an answer's text, however it is cut."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_gateway.answer_text import AnswerText
from http_gateway.parts import CallArguments, CallBegins
from tests.http_gateway.answer_texts import TOOLS, model, read

HERMES = {
    "content alone": ("hello there", "hello there", []),
    "empty": ("", "", []),
    "one": (
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        "",
        [("f", '{"a": [1, {"b": "}"}]}')],
    ),
    "content, then two calls": (
        'I will look.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"FR\\""}}\n</tool_call>',
        "I will look.",
        [("f", "{}"), ("weather", '{"city": "Paris \\"FR\\""}')],
    ),
    "content behind a call": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.',
        "Done.",
        [("f", "{}")],
    ),
    "no closing tag": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        "",
        [("f", '{"a": 1}')],
    ),
    "a call right behind another": (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "time", "arguments": {}}',
        "",
        [("f", "{}"), ("time", "{}")],
    ),
    "another order of keys": (
        '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": "é"}')],
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "arguments in a string": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "null arguments": (
        '<tool_call>{"name": "f", "arguments": null}</tool_call>',
        "",
        [("f", "{}")],
    ),
    "keys behind the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "a function that nobody offered": (
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        [("g", "{}")],
    ),
    "a tag without JSON": ("<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    "JSON that is no call": (
        'a <tool_call>{"a": 1}</tool_call>',
        'a <tool_call>{"a": 1}</tool_call>',
        [],
    ),
    "broken JSON": ("<tool_call>{name: f}</tool_call>", "<tool_call>{name: f}</tool_call>", []),
    "a name with an escape of Markdown": (
        '<tool_call>{"name": "get\\_time", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get\\_time", "arguments": {}}</tool_call>',
        [],
    ),
    "cut in the tag": ("a <tool_c", "a <tool_c", []),
    "cut in the head": ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "cut in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        "",
        [("f", '{"a": "b')],
    ),
    "blanks at the end": ("hello \n", "hello \n", []),
    "almost a tag": ("a < b <tool> <tool_calls>", "a < b <tool> <tool_calls>", []),
}
LLAMA = {
    "content alone": ("hello {there}", "hello {there}", []),
    "one": (
        '{"name": "f", "parameters": {"a": {"b": []}}}',
        "",
        [("f", '{"a": {"b": []}}')],
    ),
    "behind the tag": (
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>',
        "",
        [("f", '{"a": 1}')],
    ),
    "two": (
        '{"name": "f", "parameters": {}}; {"name": "time", "parameters": {"z": "UTC"}}',
        "",
        [("f", "{}"), ("time", '{"z": "UTC"}')],
    ),
    "with a type": (
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        "",
        [("f", '{"a": 1}')],
    ),
    "JSON that somebody asked for": (
        '{"name": "Ann", "parameters": {"age": 5}}',
        '{"name": "Ann", "parameters": {"age": 5}}',
        [],
    ),
    "other JSON": ('{"a": [1, 2]} and more', '{"a": [1, 2]} and more', []),
    "content behind the tag": ("<|python_tag|> \n1 + 1", "1 + 1", []),
    "the tag twice": ("<|python_tag|><|python_tag|>f()", "<|python_tag|>f()", []),
    "built-in tools": ('<|python_tag|>search.call(query="x")', 'search.call(query="x")', []),
    "blanks before": ('\n\n{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    "content behind a call": ('{"name": "f", "parameters": {}}\nDone.', "Done.", [("f", "{}")]),
    "cut in the head": ('{"name": "f", "par', '{"name": "f", "par', []),
    "cut in the arguments": ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
    "a brace alone": ("{", "{", []),
    "broken": ("{no json} x", "{no json} x", []),
    "empty": ("", "", []),
}
MISTRAL = {
    "content alone": ("hello [there]", "hello [there]", []),
    "an array": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, '
        '{"name": "time", "arguments": {}, "id": "abcdefghi"}]',
        "",
        [("f", '{"a": [1]}'), ("time", "{}")],
    ),
    "no blank": ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    "content before": (
        'Let me see.[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        "Let me see.",
        [("f", "{}")],
    ),
    "one object": ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "a name with an escape of Markdown": (
        '[TOOL_CALLS]{"name": "get\\_time", "arguments": {}}',
        '{"name": "get\\_time", "arguments": {}}',
        [],
    ),
    "the newer form": ('[TOOL_CALLS]f[ARGS]{"a": "]"}', "", [("f", '{"a": "]"}')]),
    "the newer form with ids": (
        '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]time[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("time", "{}")],
    ),
    "the newer form without markers": ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    "an array that breaks off": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"na',
        '{"na',
        [("f", '{"a": 1}')],
    ),
    "cut in the name": ("[TOOL_CALLS]get_wea", "[TOOL_CALLS]get_wea", []),
    "no call at all": ("a [TOOL_CALLS]" + "x" * 500, "a [TOOL_CALLS]" + "x" * 500, []),
    "cut in the marker": ("a [TOOL_", "a [TOOL_", []),
    "empty": ("", "", []),
}
CASES = [
    pytest.param(kind, text, content, calls, id=f"{kind}: {name}")
    for kind, cases in (("hermes", HERMES), ("llama3_json", LLAMA), ("mistral", MISTRAL))
    for name, (text, content, calls) in cases.items()
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart_however_the_text_is_cut(kind, text, content, calls):
    expected = ("", content, calls)

    assert read(text, kind) == expected
    assert read(text, kind, cuts=range(len(text))) == expected, "one character at a time"
    rng = random.Random(text)
    for _ in range(20):
        cuts = rng.choices(range(len(text) + 1), k=4)
        assert read(text, kind, cuts=cuts) == expected, cuts


@given(
    st.text(alphabet='{}[]":,\\ abf\n<>/tolcan_me', max_size=60),
    st.sampled_from(["hermes", "llama3_json", "mistral"]),
    st.lists(st.integers(0, 80), max_size=6),
    st.booleans(),
)
@settings(max_examples=300)
def test_no_text_breaks_a_reader_and_no_cut_changes_what_it_reads(text, kind, cuts, reasoning):
    text = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": ""}[kind] + text
    options = {"reasoning": reasoning, "begins": reasoning}

    assert read(text, kind, cuts=[min(each, len(text)) for each in cuts], **options) == read(
        text, kind, **options
    )


def test_arguments_come_while_they_are_written():
    reader = AnswerText(model("hermes"), begins_in_reasoning=False, tools=TOOLS, is_parallel=True)

    reader.push('<tool_call>\n{"name": "f", ')
    [begins] = reader.push('"arguments": {')[:1]
    assert begins == CallBegins(0, begins.call_id, "f")
    assert reader.push('"city":') == [CallArguments(0, '"city":')]
    assert reader.push(' "Paris"}') == [CallArguments(0, ' "Paris"}')]
    assert reader.push("}") == []


def test_long_arguments_take_time_in_proportion():
    arguments = json.dumps({"text": "x" * 200_000})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    _, content, calls = read(text, "hermes", cuts=range(0, len(text), 50))

    assert (content, calls) == ("", [("f", arguments)])


BEFORE_BLANKS = {
    "content": ("hermes", "x"),
    "a marker": ("hermes", "<tool_call>"),
    "a call": ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
    "the beginning": ("llama3_json", ""),
    "a name": ("mistral", "[TOOL_CALLS]"),
    "reasoning": (None, "<think>x"),
    "an answer": (None, "<think>x</think>"),
}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("blank", [" ", "\n"])
@pytest.mark.parametrize("name", BEFORE_BLANKS)
def test_long_runs_of_blanks_take_time_in_proportion(name, blank):
    kind, before = BEFORE_BLANKS[name]
    tools = TOOLS if kind else ()
    reader = AnswerText(
        model(kind, has_reasoning=kind is None),
        begins_in_reasoning=False,
        tools=tools,
        is_parallel=True,
    )
    reader.push(before)
    begun_at = time.process_time()

    for _ in range(8000):
        reader.push(80 * blank)

    assert time.process_time() - begun_at < 0.8, "0.1 ms a token"


@pytest.mark.parametrize("num_blanks", [999, 1000, 1001, 5000])
@pytest.mark.parametrize(
    ("kind", "begins", "text"),
    [
        ("hermes", False, f"x~{CALL}~y"),
        ("hermes", False, f"~{CALL}~{CALL}"),
        ("llama3_json", False, '~{"name": "f", "parameters": {}}~'),
        ("mistral", False, '[TOOL_CALLS]~f[ARGS]{"a": 1}~'),
        ("mistral", False, '[TOOL_CALLS]~[{"name": "f", "arguments": {}}]~'),
        (None, False, "~<think>x~</think>y"),
        (None, True, "~x~</think>y"),
    ],
)
def test_no_cut_changes_how_long_runs_of_blanks_are_read(kind, begins, text, num_blanks):
    text = text.replace("~", num_blanks * "\n")
    how = {"tools": TOOLS if kind else (), "begins": begins, "reasoning": kind is None}
    whole = read(text, kind, **how)

    for step in (1, 7, 700):
        assert read(text, kind, cuts=range(step, len(text), step), **how) == whole


def test_without_parallel_calls_only_the_first_one_counts():
    text = HERMES["content, then two calls"][0]

    assert read(text, "hermes", parallel=False) == ("", "I will look.", [("f", "{}")])


def test_without_tools_the_text_is_content_whatever_it_looks_like():
    for kind, cases in (("hermes", HERMES), ("llama3_json", LLAMA), ("mistral", MISTRAL)):
        for text, _, _ in cases.values():
            assert read(text, kind, tools=()) == ("", text, [])


def test_ids_have_the_form_that_templates_demand():
    def call_id(kind, text):
        reader = AnswerText(model(kind), begins_in_reasoning=False, tools=TOOLS, is_parallel=True)
        return reader.push(text)[0].call_id

    mistral = call_id("mistral", MISTRAL["no blank"][0])
    assert len(mistral) == 9
    assert mistral.isalnum()
    assert call_id("hermes", HERMES["one"][0]).startswith("call_")


REASONING = [
    # text, whether the prompt began the reasoning, reasoning, content
    ("<think>\nhm\n\nso\n</think>\n\nHello", False, "hm\n\nso", "Hello"),
    ("hm\n</think>\n\nHello", True, "hm", "Hello"),
    ("<think>\nhm</think>Hello", True, "hm", "Hello"),  # some models write the tag again
    ("Hello <think> x </think>", False, "", "Hello <think> x </think>"),
    ("\n Hello", False, "", "\n Hello"),
    ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("hm < / </thin", True, "hm < / </thin", ""),
    ("<think>hm", False, "hm", ""),
    ("<thi", False, "", "<thi"),
    ("<thi", True, "<thi", ""),
    ("", True, "", ""),
    ("hm\n", True, "hm", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"),
]


@pytest.mark.parametrize(("text", "begins", "reasoning", "content"), REASONING)
def test_reasoning_is_divided_from_the_answer_however_the_text_is_cut(
    text, begins, reasoning, content
):
    expected = (reasoning, content, [])

    assert read(text, None, begins=begins, reasoning=True) == expected
    assert read(text, None, cuts=range(len(text)), begins=begins, reasoning=True) == expected


def test_calls_in_the_reasoning_are_thoughts_and_those_behind_it_are_calls():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>I could write {call}</think>\n\n{call}"

    for cuts in ((), range(len(text))):
        assert read(text, "hermes", cuts=cuts, reasoning=True) == (
            f"I could write {call}",
            "",
            [("f", "{}")],
        )


def test_a_model_that_does_not_reason_may_write_the_tag():
    assert read("<think>a</think>b", None) == ("", "<think>a</think>b", [])


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        ([("<think>", 1), ("why", 3), ("</think>", 1), ("so", 2)], 5),
        ([("<think>why</think>\n\nso", 7)], 6),  # 20 of 22 characters
        ([("no reasoning", 4), (" at all", 3)], 0),
        ([("<think>endless", 5), ("", 1)], 6),
    ],
)
def test_reasoning_tokens_are_counted_by_their_text(pieces, count):
    reader = AnswerText(
        model(has_reasoning=True), begins_in_reasoning=False, tools=(), is_parallel=True
    )

    for text, num_tokens in pieces:
        reader.push(text, num_tokens)

    assert reader.num_reasoning_tokens == count
