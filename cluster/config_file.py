"""Reads a cluster's configuration: defaults, then a YAML file, then flags; all errors at once."""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_options import (
    SECTIONS,
    config_options,
    find_option,
    path_in,
    pool_named,
    pool_options,
)
from cluster.errors import ConfigError
from cluster.pool_config import ACCEPTED_NAME, PoolConfig
from cluster.pool_config import SECTION as POOLS
from options.option import WrongOption, WrongOptions
from options.yaml_text import Lines, YamlError, parse_yaml, told_found, told_kind
from pagewire.arguments import NEAR
from pagewire.cli.units import invalid_byte

# Given the values set so far, returns a command's own defaults, by option path.
Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def no_defaults(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no defaults."""
    return {}


def load_config(
    path: Path | None, overrides: Mapping[str, Any], defaults: Defaults = no_defaults
) -> ClusterConfig:
    """Merge a YAML file and overrides (both by option path) over defaults, and check all.

    Args:
        path: The file; None: there is none.
        overrides: The options of the command line.
        defaults: A command's own, given the options of file and command line.

    Raises:
        ConfigError: Has a line for each wrong option: the file and the option's path, or its flag,
            the value found and what is allowed. In the order of the file, flags first.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}  # option path |-> where its value is from, unless a flag gave it
    written: dict[str, str] = {}  # option path |-> its value as the file has it
    lines: dict[str, int] = {}  # path of an option or section |-> line of its last use in the file
    wrong: list[tuple[int, str]] = []  # with its line; 0: not of the file

    def spell(name: str) -> str:
        option = find_option(name) if name in overrides else None
        return option.flag if option else name

    def refuse(name: str, message: str) -> None:
        if name in overrides:  # a flag is place enough
            wrong.append((0, message))
        else:
            wrong.append((lines.get(name, 0), f"{origin[name]}: {message}"))

    if path is not None:
        content, keys = _read_yaml(path)
        for name, line, text in keys:
            if name in lines:
                both = f"lines {lines[name]} and {line}"
                twice = f"{path}: {name} is given twice, in {both}; give it once"
                wrong.append((lines[name], twice))
            lines[name], written[name] = line, text
        for name, value in _flatten(content):
            values[name], origin[name] = value, f"{path}, line {lines[name]}"
    values |= overrides
    without_name = False
    for name in [name for name in values if find_option(name) is None]:
        message = _unknown(name, values.pop(name))
        if pool_named(name) or not name.startswith(f"{POOLS}."):
            refuse(name, message)
        elif not without_name:  # else it is told already, for another of its options
            refuse(name, message)
            without_name = True
    without_role = set()  # pools of which more is not known
    for name, option in [(name, find_option(name)) for name in values]:
        assert option is not None
        if not option.allows(values[name]):
            allowed = option.allowed(spell)
            found = told_found(values.pop(name), written.get(name, ""))
            refuse(name, f"{spell(name)}: found {found}; allowed: {allowed}")
            without_role |= {pool_named(name)} if option.option.name == "role" else set()
    values = {name: each for name, each in values.items() if pool_named(name) not in without_role}
    for name, value in defaults(values).items():
        values.setdefault(name, value)
        origin.setdefault(name, "default")
    while isinstance(made := _make(values), list):
        # The whole is checked only if its sections are valid: the rest is checked again
        # without the wrong values.
        for section, problem in made:
            blamed = [path_in(section, name) for name in problem.names]
            # A missing option is reported where the rest of its pool is.
            rest = [name for name in values if pool_named(name) == pool_named(blamed[0]) != ""]
            blamed = [name for name in blamed if name in values] or rest
            if not blamed:
                continue  # another problem is blamed on all of it
            refuse(blamed[0], problem.told(lambda name: spell(path_in(section, name))))  # noqa: B023
            for name in blamed:
                values.pop(name)
            without_role |= {pool_named(name) for name in blamed if name.endswith(".role")}
        # A pool whose role was wrong must not be told to lack one.
        values = {
            name: each for name, each in values.items() if pool_named(name) not in without_role
        }
    if wrong:
        raise ConfigError("\n".join(told for _, told in sorted(wrong, key=lambda each: each[0])))
    return made


def _make(values: Mapping[str, Any]) -> ClusterConfig | list[tuple[str, WrongOption]]:
    """Return the configuration, or a problem and its section."""
    groups: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in SECTIONS}}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        groups.setdefault(section, {})[name] = value
    whole = groups.pop("")
    names = dict.fromkeys(name for name in map(pool_named, values) if name)
    of_pools = {name: groups.pop(f"{POOLS}.{name}") for name in names}
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
    whole[POOLS] = {}
    for name, group in of_pools.items():
        try:
            whole[POOLS][name] = PoolConfig(**group)
        except WrongOptions as error:
            problems += [(f"{POOLS}.{name}", each) for each in error.problems]
    if problems:
        return problems
    try:
        return ClusterConfig(**whole)
    except WrongOptions as error:
        return [("", each) for each in error.problems]


def _read_yaml(path: Path) -> tuple[Mapping[str, Any], Lines]:
    """Return a file's mapping, and path and line of each key in it, including repeated ones."""
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
        told = f"found {told_kind(content)} at the top level; allowed: a mapping of options"
        raise ConfigError(f"{path}: {told}")
    return content, lines


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        option = find_option(path)
        is_section = isinstance(value, Mapping) and not (option and option.is_mapping)
        if is_section and (value or path in SECTIONS or path == POOLS):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _unknown(name: str, value: object) -> str:
    found = told_found(value)
    if name == POOLS:
        return f"{name}: found {found}; allowed: a mapping of names to the options of pools"
    if name.startswith(f"{POOLS}.") and not pool_named(name):
        return f"{POOLS}: found the pool name ''; allowed: {ACCEPTED_NAME}"
    pool = pool_named(name)
    options = pool_options(pool) if pool else config_options()
    section = name if name in SECTIONS or name == f"{POOLS}.{pool}" else ""
    if section:
        example = next(each.path for each in options.values() if each.section == section)
        return (
            f"{name}: found {found}; allowed: a mapping of the options of this section, such as "
            f"{example}"
        )
    section, _, rest = name.partition(".")
    if _nearest(section, [POOLS], NEAR) and find_option(f"{POOLS}.{rest}"):
        return _told_unknown(name, f"{POOLS}.{rest}")
    near = _nearest(_leaf(name), {_leaf(path) for path in options}, NEAR)
    # Of options of several sections by one name that of the likeliest section.
    near = _nearest(name, [path for path in options if _leaf(path) in near], 0)
    return _told_unknown(name, *near)


def _told_unknown(name: str, *meant: str) -> str:
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return f"{name}: found an unknown option; allowed: those of docs/configuration.md{hint}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _nearest(name: str, names: Collection[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
