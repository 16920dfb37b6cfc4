"""Reads a cluster's configuration: defaults, then a YAML file, then flags; all errors at once."""

import difflib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config import ClusterConfig
from cluster.config_options import ConfigOption, config_options
from cluster.errors import ConfigError

# Given what is set already, returns what a command sets otherwise, by option path.
Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def no_defaults(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no defaults of a command's own."""
    return {}


def load_config(
    path: Path | None, overrides: Mapping[str, Any], defaults: Defaults = no_defaults
) -> ClusterConfig:
    """Merge a YAML file and overrides (both by option path) over defaults, and check all.

    Args:
        path: The file; None: there is none.
        overrides: What the command line gave.
        defaults: A command's own, given what file and command line set.

    Raises:
        ConfigError: Has a line for each wrong option: the file, the option's path, the value found
            and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}  # option path |-> where its value is from
    wrong = []
    if path is not None:
        content, duplicates = _read_yaml(path)
        wrong += [f"{path}: {each}" for each in duplicates]
        for name, value in _flatten(content):
            if name in values:
                wrong.append(f"{path}: {name} is given twice")
            values[name], origin[name] = value, str(path)
    for name, value in overrides.items():
        values[name], origin[name] = value, "command line"
    options = config_options()
    for name in [name for name in values if name not in options]:
        del values[name]
        wrong.append(f"{origin[name]}: {_unknown(name, options)}")
    for name in [name for name in values if isinstance(values[name], bool)]:
        if options[name].value_type is not bool:
            # Python, and with it pydantic, would take it for 0 or 1.
            kind = options[name].value_type.__name__
            wrong.append(f"{origin[name]}: {name} is {values.pop(name)}; it must be of type {kind}")
    for name, value in defaults(values).items():
        values.setdefault(name, value)
        origin.setdefault(name, "default")
    while True:
        try:
            config = ClusterConfig.model_validate(_nest(values))
            break
        except ValidationError as error:
            # A section's rules are looked at only when the types of its options are right, so the
            # rest is checked again without what was wrong.
            for problem in _explain(error, values):
                wrong.append(f"{origin[problem.paths[0]]}: {problem.message}")
                for name in problem.paths:
                    values.pop(name, None)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return config


def _read_yaml(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return a file's mapping, and a line for each key that it has twice."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        content = loader.get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if content is None:
        return {}, []
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds {type(content).__name__}, must be a mapping of options")
    return content, loader.duplicates


class _Loader(yaml.SafeLoader):
    """Notes a key that a mapping has twice; the last value stays."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}  # key |-> line of its last use
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                self.duplicates.append(f"{name} is given twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _unknown(name: str, options: Mapping[str, ConfigOption]) -> str:
    sections = {option.section for option in options.values() if option.section}
    if name in sections:
        return f"{name} is a section; give a mapping of its options"
    leaves = {option.path.rpartition(".")[2]: option.path for option in options.values()}
    close = difflib.get_close_matches(name, options, n=1)
    close = close or [
        leaves[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)
    ]
    hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all options"
    return f"unknown option {name}; {hint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    paths: list[str]  # of the options to blame, which somebody has set; at least one
    message: str


def _explain(error: ValidationError, values: Mapping[str, Any]) -> Iterator[_Problem]:
    for each in error.errors():
        path = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if path in values:
            yield _Problem(paths=[path], message=f"{path} is {values[path]!r}; it {message}")
            continue
        # A rule of a section, or of the whole: a line for each option, which begins with its name.
        section = f"{path}." if path else ""
        for line in message.splitlines():
            named = [section + word for word in re.findall(r"[\w.]+", line)]
            blamed = [name for name in named if name in values]
            yield _Problem(paths=blamed, message=section + line)
