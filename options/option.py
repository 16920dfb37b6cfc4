"""An option: a field of a configuration class with its default, its meaning and its bounds.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class RouterConfig:
        max_resumptions: int = option(3, "Attempts after the first.", at_least=0)

        def __post_init__(self) -> None:
            check_options(self)

Declarations feed the checks, the command line's flags and the documentation. Fields without
`option` are not options: only code sets them.
"""

import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Spell = Callable[[str], str]  # name of an option |-> the reader's spelling

_KEY = "option"  # of a field's metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The meaning of an option, and its limits beyond those of its type."""

    meaning: str  # sentences
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    exceeds: str = ""  # another option of the same class
    accepts: Callable[[Any], bool] | None = None  # replaces type and bounds
    accepted: str = ""  # the values that `accepts` allows, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option as declared."""

    name: str
    type: Any  # int, float, bool, str, a Literal, a Mapping of texts, or one of them or None
    default: Any
    rule: Rule

    @property
    def simple_type(self) -> Any:
        """The type of a word on the command line: int, float, bool or str."""
        wanted = self._type_of_values
        if typing.get_origin(wanted) is Literal:
            return type(typing.get_args(wanted)[0])
        return wanted if wanted in (int, float, bool) else str

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping of texts; on a command line, each word is an entry."""
        return typing.get_origin(self._type_of_values) is Mapping

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values, if they can be listed."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def _type_of_values(self) -> Any:
        if typing.get_origin(self.type) in (types.UnionType, typing.Union):
            return next(a for a in typing.get_args(self.type) if a is not types.NoneType)
        return self.type

    def allows(self, value: Any) -> bool:
        """Return whether a value has the type and lies within its own bounds."""
        rule = self.rule
        if value is None and self.default is None:
            return True
        if rule.accepts is not None:
            return rule.accepts(value)
        if self.choices:
            return any(value == each and type(value) is type(each) for each in self.choices)
        if self.simple_type not in (int, float):
            return type(value) is self.simple_type
        if type(value) not in (int, self.simple_type):
            return False
        if self.simple_type is float and not -sys.float_info.max <= value <= sys.float_info.max:
            return False  # NaN, infinite, or an integer too large for a float
        return (
            (rule.at_least is None or value >= rule.at_least)
            and (rule.above is None or value > rule.above)
            and (rule.at_most is None or value <= rule.at_most)
        )

    def allowed(self, spell: Spell = str) -> str:
        """Return the allowed values in words: "an integer, 1 or more"."""
        rule = self.rule
        if rule.accepts is not None:
            return rule.accepted
        if self.choices:
            *others, last = map(repr, self.choices)
            return f"{', '.join(others)} or {last}"
        kinds = {int: "an integer", float: "a finite number", bool: "true or false"}
        words = kinds.get(self.simple_type, "a text")
        if rule.at_least is not None:
            end = "or more" if rule.at_most is None else f"to {rule.at_most}"
            words += f", {rule.at_least} {end}"
        if rule.above is not None:
            words += f" above {rule.above}"
            words += "" if rule.at_most is None else f", up to {rule.at_most}"
        if rule.exceeds:
            words += f", greater than {spell(rule.exceeds)}"
        return words


class OptionName(str):
    """An option's name within an error, in the reader's spelling."""

    __slots__ = ()


def told_value(value: object) -> str:
    """Return a value in words of a configuration file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


class _Told:
    """A value within an error; with !r as told_value has it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return str(self._value)

    def __repr__(self) -> str:
        return told_value(self._value)


class WrongOption:
    """One wrong value, or values that do not go together.

    Args:
        template: For str.format.
        parts: Its arguments. The first OptionName is the option to blame.
    """

    def __init__(self, template: str, *parts: object) -> None:
        self._template = template
        self._parts = parts
        self.names = tuple(str(each) for each in parts if isinstance(each, OptionName))

    def told(self, spell: Spell = str) -> str:
        """Return what is wrong, in words."""
        spelled = (spell(p) if isinstance(p, OptionName) else _Told(p) for p in self._parts)
        return self._template.format(*spelled)


class WrongOptions(ValueError):
    """A configuration is invalid; has a line for each wrong option."""

    def __init__(self, problems: Sequence[WrongOption]) -> None:
        super().__init__("\n".join(each.told() for each in problems))
        self.problems = tuple(problems)


def option(
    default: T,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    exceeds: str = "",
    accepts: Callable[[Any], bool] | None = None,
    accepted: str = "",
) -> T:
    """Declare a field as an option; see Rule."""
    rule = Rule(
        meaning=meaning,
        at_least=at_least,
        above=above,
        at_most=at_most,
        exceeds=exceeds,
        accepts=accepts,
        accepted=accepted,
    )
    declared: Any = field(default=default, metadata={_KEY: rule})
    return declared  # type: ignore[no-any-return] # dataclass turns it into the default


@cache
def options_of(owner: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, in declaration order."""
    hints = typing.get_type_hints(owner)
    return {
        each.name: Option(
            name=each.name,
            type=hints[each.name],
            default=each.default,
            rule=each.metadata[_KEY],
        )
        for each in fields(owner)
        if _KEY in each.metadata
    }


def check_options(config: Any) -> None:
    """Check each option of a configuration, and those that must be greater than another.

    Raises:
        WrongOptions: Names each wrong option, what was found and what is allowed.
    """
    owner: Any = type(config)
    options = options_of(owner)
    problems = [
        WrongOption("{}: found {!r}; allowed: {}", OptionName(name), value, each.allowed())
        for name, each in options.items()
        if not each.allows(value := getattr(config, name))
    ]
    wrong = {name for each in problems for name in each.names}
    for name, each in options.items():
        other = each.rule.exceeds
        if not other or {name, other} & wrong:
            continue
        if getattr(config, name) <= getattr(config, other):
            template = "{}: found {!r}; allowed: more than {}, which is {!r}"
            parts = OptionName(name), getattr(config, name), OptionName(other)
            problems.append(WrongOption(template, *parts, getattr(config, other)))
    if problems:
        raise WrongOptions(problems)
