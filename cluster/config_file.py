"""Reads a cluster's configuration: defaults, then a YAML file, then flags; all errors at once."""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_options import (
    ALL_OPTIONS,
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
from options.option import OptionName, WrongOption, WrongOptions
from options.yaml_text import Lines, YamlError, parse_yaml, told_found, told_kind
from pagewire.arguments import NEAR
from pagewire.cli.units import invalid_byte

ALLOWED = "allowed: YAML in UTF-8 that this user can read"

# Given the values set so far, returns a command's own defaults, by option path.
Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def no_defaults(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no defaults."""
    return {}


def load_config(
    path: Path | None,
    overrides: Mapping[str, Any],
    defaults: Defaults = no_defaults,
    uses: Callable[[str], bool] = lambda path: True,
) -> ClusterConfig:
    """Merge a YAML file and overrides (both by option path) over defaults, and check all.

    Args:
        path: The file; None: there is none.
        overrides: The options of the command line.
        defaults: A command's own, given the options of file and command line.
        uses: Returns whether a command uses an option. Of the others only the names are checked: a
            mistyped one may be meant to be used.

    Raises:
        ConfigError: Has a line for each wrong option: the file and the option's path, or its flag,
            the value found and what is allowed. In the order of the file, flags first.
    """
    reading = _Reading(overrides)
    if path is not None:
        reading.read(path)
    reading.values |= overrides
    reading.drop_unknown()
    reading.drop_unused(uses)
    reading.drop_wrong()
    reading.fill(defaults)
    made = reading.make()
    if reading.wrong:
        ordered = sorted(reading.wrong, key=lambda each: each[0])
        raise ConfigError("\n".join(told for _, told in ordered))
    return made


class _Reading:
    """The options of a file and a command line, and what is wrong with them."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}  # option path |-> value, without the wrong ones
        self.wrong: list[tuple[int, str]] = []  # with its line; 0: not in the file
        self._overrides = overrides
        self._origin: dict[str, str] = {}  # option path |-> where it is from, unless from a flag
        self._written: dict[str, str] = {}  # option path |-> its value as the file has it
        self._lines: dict[str, int] = {}  # path of an option or section |-> line of its last use
        self._dropped: set[str] = set()  # options whose values were wrong
        self._without_role: set[str] = set()  # pools whose role was wrong

    def read(self, path: Path) -> None:
        """Take the options of a file."""
        content, keys = _read_yaml(path)
        for name, line, text in keys:
            if name in self._lines:
                both = f"lines {self._lines[name]} and {line}"
                twice = f"{path}: {name} is given twice, in {both}; give it once"
                self.wrong.append((self._lines[name], twice))
            self._lines[name], self._written[name] = line, text
        for name, value in _flatten(content):
            self.values[name] = value
            self._origin[name] = f"{path}, line {self._lines[name]}"

    def drop_unknown(self) -> None:
        """Refuse options that do not exist."""
        is_told = False  # a pool without a name, once for all its options
        for name in [name for name in self.values if find_option(name) is None]:
            message = _unknown(name, self.values.pop(name))
            is_nameless = name.startswith(f"{POOLS}.") and not pool_named(name)
            if not (is_nameless and is_told):
                self._refuse(name, message)
            is_told |= is_nameless

    def drop_unused(self, uses: Callable[[str], bool]) -> None:
        """Ignore the values of options that the command does not use."""
        self.values = {name: value for name, value in self.values.items() if uses(name)}

    def drop_wrong(self) -> None:
        """Refuse values of a wrong type, or outside their own bounds."""
        for name, option in [(name, find_option(name)) for name in self.values]:
            assert option is not None
            if not option.allows(self.values[name]):
                self._dropped.add(name)
                allowed = option.allowed(self._spell)
                found = told_found(self.values.pop(name), self._written.get(name, ""))
                self._refuse(name, f"{self._spell(name)}: found {found}; allowed: {allowed}")
                if option.option.name == "role":
                    self._without_role.add(pool_named(name))
        self._drop_pools_without_role()

    def fill(self, defaults: Defaults) -> None:
        """Use a command's own defaults for what is not set."""
        for name, value in defaults(self.values).items():
            self.values.setdefault(name, value)
            self._origin.setdefault(name, "default")

    def make(self) -> ClusterConfig:
        """Return the configuration that the right values make.

        It is checked as a whole only once all sections are valid, so the check is repeated without
        the wrong values.
        """
        while isinstance(made := _make(self.values), list):
            replaced = self._dropped.copy()  # by defaults, in what was checked
            for section, problem in made:
                self._blame(section, problem, replaced)
            self._drop_pools_without_role()
        return made

    def _blame(self, section: str, problem: WrongOption, replaced: set[str]) -> None:
        """Refuse the options of a problem, and drop them.

        A problem of an option among those replaced is not told: it is that of a default.
        """
        blamed = [path_in(section, name) for name in problem.names]
        is_told = replaced.isdisjoint(blamed)
        # A missing option is reported where the rest of its pool is.
        rest = [name for name in self.values if pool_named(name) == pool_named(blamed[0]) != ""]
        blamed = [name for name in blamed if name in self.values] or rest
        if not blamed:
            return  # an earlier problem was blamed on all of them
        told = problem.told(lambda name: self._spell(path_in(section, name)))
        found = find_option(path_in(section, problem.names[0]))
        if blamed != rest and found and found.path != blamed[0] and found.default not in (None, ""):
            told += f"; {found.path} is not given and has its default"
        if is_told:
            self._refuse(blamed[0], told)
        for name in blamed:
            self.values.pop(name)
        self._dropped.update(blamed)
        self._without_role |= {pool_named(name) for name in blamed if name.endswith(".role")}

    def _drop_pools_without_role(self) -> None:
        """Drop the rest of pools whose role was wrong: they must not be told to lack one."""
        for name in [name for name in self.values if pool_named(name) in self._without_role]:
            del self.values[name]

    def _spell(self, name: str) -> str:
        option = find_option(name) if name in self._overrides else None
        return option.flag if option else name

    def _refuse(self, name: str, message: str) -> None:
        if name in self._overrides:  # the flag tells the place
            self.wrong.append((0, message))
        else:
            self.wrong.append((self._lines.get(name, 0), f"{self._origin[name]}: {message}"))


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
    problems: list[tuple[str, WrongOption]] = []
    if tenants_file := groups["router"].get("tenants_file"):  # for processes in other folders
        try:
            groups["router"]["tenants_file"] = str(Path(tenants_file).expanduser().absolute())
        except RuntimeError:  # of expanduser
            told = "{}: found {!r}; allowed: a path, with ~ only for a user whose home is known"
            problems.append(("router", WrongOption(told, OptionName("tenants_file"), tenants_file)))
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
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {ALLOWED}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {invalid_byte(error)} is not UTF-8; {ALLOWED}") from error
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
    # If several sections have an option of this name, the one of the likeliest section.
    near = _nearest(name, [path for path in options if _leaf(path) in near], 0)
    # Or the only option that it begins, as tls.key begins tls.key_file.
    begun = [path for path in options if path.startswith(f"{name}_")]
    if not near and len(begun) == 1:
        near = begun
    return _told_unknown(name, *near)


def _told_unknown(name: str, *meant: str) -> str:
    hint = f"; did you mean {meant[0]}?" if meant else ""
    pool = pool_named(name)
    allowed = ", ".join(map(_leaf, pool_options(pool))) if pool else f"those of {ALL_OPTIONS}"
    return f"{name}: found an unknown option; allowed: {allowed}{hint}"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _nearest(name: str, names: Collection[str], cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
