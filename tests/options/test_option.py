from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from options.option import OptionName, WrongOption, WrongOptions, check_options, option, options_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    limit: int = option(4, "How many.", at_least=1)
    most: int = option(8, "The most.", exceeds="limit")
    share: float = option(0.5, "Of all.", above=0, at_most=1)
    is_on: bool = option(False, "Whether.")
    kind: Literal["a", "b"] = option("a", "Which.")
    name: str | None = option(None, "Whose.", accepts=lambda v: v != "", accepted="a name")
    paths: Mapping[str, str] | None = option(
        None, "Where.", accepts=lambda v: v != {}, accepted="paths"
    )
    key: bytes = b""  # no option
    rest: list[int] = field(default_factory=list)  # no option

    def __post_init__(self) -> None:
        check_options(self)


def test_only_declared_fields_are_options_in_their_order() -> None:
    assert list(options_of(Config)) == ["limit", "most", "share", "is_on", "kind", "name", "paths"]
    assert options_of(Config)["limit"].rule.meaning == "How many."
    assert Config().limit == options_of(Config)["limit"].default == 4


def test_mappings_are_told_from_single_values() -> None:
    options = options_of(Config)

    assert [name for name, each in options.items() if each.is_mapping] == ["paths"]
    assert options["name"].simple_type is options["paths"].simple_type is str


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("limit", "an integer, 1 or more"),
        ("most", "an integer, greater than limit"),
        ("share", "a finite number above 0, up to 1"),
        ("is_on", "true or false"),
        ("kind", "'a' or 'b'"),
        ("name", "a name"),
    ],
)
def test_what_is_allowed_can_be_said(name: str, words: str) -> None:
    assert options_of(Config)[name].allowed() == words


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 0}, "limit: found 0; allowed: an integer, 1 or more"),
        ({"limit": 2.0}, "limit: found 2.0; allowed: an integer"),
        ({"limit": True}, "limit: found true; allowed: an integer"),
        ({"share": 0}, "share: found 0; allowed: a finite number above 0"),
        ({"share": 1.1}, "share: found 1.1; allowed: a finite number above 0, up to 1"),
        ({"share": float("nan")}, "share: found nan; allowed: a finite number"),
        ({"share": float("inf")}, "share: found inf; allowed: a finite number"),
        ({"share": 10**400}, "share: found 1000"),
        ({"share": "1"}, "share: found '1'; allowed: a finite number"),
        ({"is_on": 1}, "is_on: found 1; allowed: true or false"),
        ({"kind": "c"}, "kind: found 'c'; allowed: 'a' or 'b'"),
        ({"name": ""}, "name: found ''; allowed: a name"),
        ({"limit": 9}, "most: found 8; allowed: more than limit, which is 9"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongOptions) as caught:
        Config(**values)

    [problem] = caught.value.problems
    assert str(caught.value).startswith(message)
    assert problem.names[0] == message.partition(":")[0]


def test_all_wrong_values_are_told_and_none_is_compared_with_another() -> None:
    with pytest.raises(WrongOptions) as caught:
        Config(limit="x", share=2, most=1)  # type: ignore[arg-type]

    assert [each.names for each in caught.value.problems] == [("limit",), ("share",)]


def test_names_in_an_error_are_spelled_for_their_reader_and_values_are_not() -> None:
    problem = WrongOption("{} is {!r}; see {}", OptionName("a"), "a", OptionName("b"))

    assert problem.told() == "a is 'a'; see b"
    assert problem.told(lambda name: f"--{name}") == "--a is 'a'; see --b"
