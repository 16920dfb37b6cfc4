"""The options of a cluster's configuration by path: for files, flags and documentation.

An option's path in a file, `router.max_active_requests`, gives its flag,
`--router-max-active-requests`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from cluster.config import ClusterConfig
from cluster.pool_config import SECTION, PoolConfig
from options.option import Option, Spell, options_of

# Where users find all options except those of pools: an installation has no documentation.
ALL_OPTIONS = "`pagewire serve --help`"
# The configuration classes within the cluster's, by name.
SECTIONS: dict[str, Any] = {
    each.name: each.type for each in fields(ClusterConfig) if is_dataclass(each.type)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOption:
    """One leaf of the configuration."""

    section: str  # "router"; empty for the top level
    option: Option

    @property
    def path(self) -> str:
        """Its place in a file."""
        return f"{self.section}.{self.option.name}" if self.section else self.option.name

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def value_type(self) -> Any:
        """The type that a command line parses: int, float, bool or str."""
        return self.option.simple_type

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping, not a single value."""
        return self.option.is_mapping

    @property
    def default(self) -> Any:
        return self.option.default

    @property
    def description(self) -> str:
        """Its meaning, and its choices."""
        choices = ", ".join(map(str, self.option.choices))
        return self.option.rule.meaning + (f" One of {choices}." if choices else "")

    def allows(self, value: object) -> bool:
        """Return whether a value is valid, other options aside."""
        return value is not None and self.option.allows(value)

    def allowed(self, spell: Spell = str) -> str:
        """Return the allowed values in words; `spell` turns paths into names."""
        return self.option.allowed(lambda name: spell(path_in(self.section, name)))


@cache  # each command asks several times
def config_options() -> Mapping[str, ConfigOption]:
    """Return all options by path, in the order of their declaration."""
    owners: dict[str, Any] = {"": ClusterConfig, **SECTIONS}
    found = [
        ConfigOption(section=section, option=option)
        for section, owner in owners.items()
        for option in options_of(owner).values()
    ]
    return {each.path: each for each in found}


@cache
def pool_options(name: str) -> Mapping[str, ConfigOption]:
    """Return the options of a pool by path; they stand in files, and have no flags."""
    section = f"{SECTION}.{name}"
    found = [ConfigOption(section=section, option=each) for each in options_of(PoolConfig).values()]
    return {each.path: each for each in found}


def pool_named(path: str) -> str:
    """Return the name of the pool that a path belongs to; empty: none."""
    section, _, rest = path.partition(".")
    return rest.partition(".")[0] if section == SECTION else ""


def find_option(path: str) -> ConfigOption | None:
    """Return the option at a path, if there is one."""
    if name := pool_named(path):
        return pool_options(name).get(path)
    return config_options().get(path)


def path_in(section: str, name: str) -> str:
    """Return the path of an option that is named from within a section."""
    return f"{section}.{name}" if section else name
