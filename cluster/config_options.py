"""The options of a cluster's configuration, one by one: for files, flags and documentation.

An option's path in a file, `router.max_active_requests`, gives its flag,
`--router-max-active-requests`.
"""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOption:
    """One leaf of the configuration."""

    path: str  # "router.max_active_requests"
    section: str  # "router"; empty for the top level
    value_type: Any  # as a command line parses it: int, float, str or bool
    default: Any
    description: str

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return "--" + self.path.replace(".", "-").replace("_", "-")


def config_options() -> dict[str, ConfigOption]:
    """Return all options by path, in the order of their declaration."""
    return {option.path: option for option in _walk() if option.path not in INTERNAL_PATHS}


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


def _flag_type(annotation: Any) -> Any:
    """Return the simple type in which a flag is parsed; pydantic checks the rest."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return type(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation if annotation in (int, float, bool) else str
