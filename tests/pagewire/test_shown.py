"""Values in errors: whole where they are short, in Python's words or in JSON's."""

from collections.abc import Iterator
from typing import Any

import pytest

from pagewire import InvalidRequestError
from pagewire.arguments import check_sampling
from pagewire.shown import shown, shown_with_type, writes_json

DEEP = [[[[[[[[1]]]]]]]]


@pytest.fixture
def json_caller() -> Iterator[None]:
    token = writes_json.set(True)
    yield
    writes_json.reset(token)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true (boolean)"),
        ("x", "'x' (string)"),
        (5, "5 (number)"),
        (0.5, "0.5 (number)"),
        (float("-inf"), "-Infinity (number)"),
        ([True, None, "it's", 1.5], '[true, null, "it\'s", 1.5] (array)'),
        ({"a": {"b": [False]}}, '{"a": {"b": [false]}} (object)'),
    ],
)
def test_a_caller_that_writes_json_reads_json(json_caller: None, value: Any, words: str) -> None:
    assert shown_with_type(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (True, "True (bool)"),
        ([True, None, "x"], "[True, None, 'x'] (list)"),
        ({"a": float("inf")}, "{'a': inf} (dict)"),
    ],
)
def test_a_caller_that_writes_python_reads_python(value: Any, words: str) -> None:
    assert shown_with_type(value) == words


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 10**6] * 9, {"x" * 10**6: 1}, 10**4000])
def test_what_is_long_is_cut(json_caller: None, value: Any) -> None:
    assert len(shown(value)) < 400


def test_what_is_nested_deeply_is_cut(json_caller: None) -> None:
    assert shown(DEEP) == "[[[[[[[...]]]]]]]"


def test_what_is_allowed_is_in_the_callers_words_too(json_caller: None) -> None:
    with pytest.raises(InvalidRequestError, match=r"found 1 \(number\); allowed: true or false$"):
        check_sampling({"ignore_eos": 1})
