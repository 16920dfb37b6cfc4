"""Reads a cluster's configuration: defaults, then a YAML file, then flags; all errors at once."""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_options import SECTIONS, ConfigOption, config_options, path_in
from cluster.errors import ConfigError
from options.option import WrongOption, WrongOptions
from options.yaml_text import Lines, YamlError, parse_yaml
from pagewire.cli.units import invalid_byte

NEAR = 0.8  # of difflib's ratio: two names of which one is a slip for the other

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
        ConfigError: Has a line for each wrong option: the file and the option's path, or its flag,
            the value found and what is allowed. In the order of the file, flags first.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}  # option path |-> where its value is from, unless a flag gave it
    lines: dict[str, int] = {}  # path of an option or section |-> line of its last use in the file
    options = config_options()
    wrong: list[tuple[int, str]] = []  # with its line; 0: not of the file

    def spell(name: str) -> str:
        return options[name].flag if name in overrides else name

    def refuse(name: str, message: str) -> None:
        if name in overrides:  # a flag is place enough
            wrong.append((0, message))
        else:
            wrong.append((lines.get(name, 0), f"{origin[name]}: {message}"))

    if path is not None:
        content, keys = _read_yaml(path)
        for name, line in keys:
            if name in lines:
                both = f"lines {lines[name]} and {line}"
                twice = f"{path}: {name} is given twice, in {both}; give it once"
                wrong.append((lines[name], twice))
            lines[name] = line
        for name, value in _flatten(content):
            values[name], origin[name] = value, f"{path}, line {lines[name]}"
    values |= overrides
    for name in [name for name in values if name not in options]:
        refuse(name, _unknown(name, values.pop(name), options))
    for name in [name for name in values if not options[name].allows(values[name])]:
        allowed = options[name].allowed(spell)
        refuse(name, f"{spell(name)} is {_shown(values.pop(name))}; it must be {allowed}")
    for name, value in defaults(values).items():
        values.setdefault(name, value)
        origin.setdefault(name, "default")
    while isinstance(made := _make(values), list):
        # The whole is looked at only when its sections are right, so the rest is checked again
        # without what was wrong.
        for section, problem in made:
            blamed = [path_in(section, name) for name in problem.names]
            blamed = [name for name in blamed if name in values]
            if not blamed:
                continue  # all of it is blamed for another problem
            refuse(blamed[0], problem.told(lambda name: spell(path_in(section, name))))  # noqa: B023
            for name in blamed:
                values.pop(name)
    if wrong:
        raise ConfigError("\n".join(told for _, told in sorted(wrong, key=lambda each: each[0])))
    return made


def _make(values: Mapping[str, Any]) -> ClusterConfig | list[tuple[str, WrongOption]]:
    """Return the configuration, or what is wrong with it and the section where it is."""
    groups: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in SECTIONS}}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        groups[section][name] = value
    whole = groups.pop("")
    if "model" in whole:
        whole["model"] = Path(whole["model"])
    if whole.get("network_interface"):
        whole.setdefault("host", "")  # its address
    if tenants_file := groups["router"].get("tenants_file"):  # for processes in other folders
        groups["router"]["tenants_file"] = str(Path(tenants_file).expanduser().absolute())
    problems: list[tuple[str, WrongOption]] = []
    for section, group in groups.items():
        try:
            whole[section] = SECTIONS[section](**group)
        except WrongOptions as error:
            problems += [(section, each) for each in error.problems]
    if problems:
        return problems
    try:
        return ClusterConfig(**whole)
    except WrongOptions as error:
        return [("", each) for each in error.problems]


def _read_yaml(path: Path) -> tuple[Mapping[str, Any], Lines]:
    """Return a file's mapping, and of each key in it, repeated ones too, the path and the line."""
    try:
        content, lines = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {invalid_byte(error)} is not UTF-8") from error
    except YamlError as error:
        raise ConfigError(f"{path}{error}") from error
    if content is None:
        return {}, []
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds {type(content).__name__}, must be a mapping of options")
    return content, lines


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        option = config_options().get(path)
        is_section = isinstance(value, Mapping) and not (option and option.is_mapping)
        if is_section and (value or path in SECTIONS):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _shown(value: object) -> str:
    return "empty" if value is None else repr(value)


def _unknown(name: str, value: object, options: Mapping[str, ConfigOption]) -> str:
    if name in SECTIONS:
        example = next(each.path for each in options.values() if each.section == name)
        return (
            f"{name} is {_shown(value)}; {name} is a section: it must be a mapping of options such "
            f"as {example}"
        )
    near = _nearest(_leaf(name), {_leaf(path) for path in options}, NEAR)
    # Of options of several sections by one name that of the likeliest section.
    near = _nearest(name, [path for path in options if _leaf(path) in near], 0)
    hint = f"did you mean {near[0]}?" if near else "see docs/configuration.md for all options"
    return f"unknown option {name}; {hint}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _nearest(name: str, names: Collection[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
