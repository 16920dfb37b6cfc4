"""The options of a cluster's configuration, one by one: for files, flags and documentation.

An option's path in a file, `router.max_active_requests`, gives its flag,
`--router-max-active-requests`.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from cluster.config import ClusterConfig

# Set by the composition root alone, so neither in files nor flags.
INTERNAL_PATHS = {
    "decode_worker.hash_key",
    "decode_worker.transfer_deadlines",
    "prefill_worker.hash_key",
    "prefill_worker.transfer_deadlines",
    "router.cache_salt",
    "router.page_hash_key",
    "router.router_id",
}

SECTIONS = {
    name for name, info in ClusterConfig.model_fields.items() if is_dataclass(info.annotation)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOption:
    """One leaf of the configuration."""

    path: str  # "router.max_active_requests"
    section: str  # "router"; empty for the top level
    value_type: Any  # as a command line parses it: int, float, str or bool
    default: Any
    description: str
    allowed: str  # "an integer, 1 or more"

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return "--" + self.path.replace(".", "-").replace("_", "-")


@cache  # each command asks several times
def config_options() -> Mapping[str, ConfigOption]:
    """Return all options by path, in the order of their declaration."""
    return {option.path: option for option in _walk() if option.path not in INTERNAL_PATHS}


def qualified(text: str, section: str) -> str:
    """Return a text in which all names of a section's options begin with that of the section."""
    owner: Any = ClusterConfig.model_fields[section].annotation
    names = "|".join(field.name for field in fields(owner))
    return re.sub(rf"\b({names})\b", rf"{section}.\1", text)


def _walk() -> Iterator[ConfigOption]:
    for name, info in ClusterConfig.model_fields.items():
        if is_dataclass(info.annotation):
            yield from _walk_section(name, info.annotation)
            continue
        yield ConfigOption(
            path=name,
            section="",
            value_type=_flag_type(info.annotation),
            default=info.default,
            description=_with_choices(info.description or "", info.annotation),
            allowed=_allowed(info.annotation, _interval(info.metadata)),
        )


def _walk_section(section: str, owner: Any) -> Iterator[ConfigOption]:
    hints = typing.get_type_hints(owner)
    comments = field_comments(owner)
    for field in fields(owner):
        has_default = field.default is not MISSING
        yield ConfigOption(
            path=f"{section}.{field.name}",
            section=section,
            value_type=_flag_type(hints[field.name]),
            default=field.default if has_default else None,
            description=comments.get(field.name, ""),
            allowed=_allowed(hints[field.name], _rule(owner, section, field.name)),
        )


def field_comments(owner: type) -> dict[str, str]:
    """Return what the comments beside a dataclass's fields say: their documentation."""
    comments: dict[str, str] = {}
    current = ""  # the field whose comment may go on in the next line
    for line in inspect.getsource(owner).splitlines():
        if found := re.match(r"    (\w+): ", line):
            current = found[1]
        elif not line.strip() or re.match(r"    (@|def )", line):
            current = ""
        _, sign, comment = line.partition("# ")
        if current and sign:
            comments[current] = f"{comments.get(current, '')} {comment.strip()}".strip()
    return {name: text[0].upper() + text[1:] for name, text in comments.items()}


def _with_choices(description: str, annotation: Any) -> str:
    if typing.get_origin(annotation) is not Literal:
        return description
    return f"{description} One of {', '.join(map(str, typing.get_args(annotation)))}."


def _allowed(annotation: Any, bounds: str) -> str:
    if typing.get_origin(annotation) is Literal:
        *others, last = map(repr, typing.get_args(annotation))
        return f"{', '.join(others)} or {last}"
    kind = {int: "an integer", float: "a finite number", bool: "true or false"}
    return kind.get(_flag_type(annotation), "a text") + bounds


def _interval(constraints: Sequence[Any]) -> str:
    """Return the bounds of an option of the top level."""
    bounds = {
        name: getattr(each, name)
        for each in constraints
        for name in ("ge", "gt", "le")
        if hasattr(each, name)
    }
    match bounds:
        case {"ge": low, "le": high}:
            return f", {low} to {high}"
        case {"gt": low, "le": high}:
            return f" above {low}, up to {high}"
        case {"ge": low}:
            return f", {low} or more"
        case {"gt": low}:
            return f" above {low}"
        case _:
            return ""


def _rule(owner: Any, section: str, name: str) -> str:
    """Return the bounds of a section's option: what its own check says of -1, which none may be."""
    try:
        owner(**{name: -1})
    except ValueError as error:
        rule = rf"^{name} is -1; it must (.*?)(,? and finite|, which is .*)?$"
        if found := re.search(rule, str(error), re.M):
            is_range = found[1].startswith("be ")
            bounds = found[1].removeprefix("be ") if is_range else f"and must {found[1]}"
            return f", {qualified(bounds, section)}"
    return ""


def _flag_type(annotation: Any) -> Any:
    """Return the simple type in which a flag is parsed; pydantic checks the rest."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return type(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation if annotation in (int, float, bool) else str
