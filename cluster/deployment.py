"""The settings from which a cluster's processes are started; its controller keeps them."""

import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.config_options import config_options, pool_options
from cluster.errors import ConfigError
from cluster.pool_config import ROLES, pool_key
from cluster.pool_config import SECTION as POOLS
from credentials.errors import KeyFileError
from credentials.key_file import read_secret
from credentials.secret import ClusterSecret
from options.kept_by_name import kept_by_name

# Options of the command that starts or addresses a cluster, not of the cluster.
OF_THE_CALLER = {"ray_address", "start_timeout_s"}


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """All settings of its processes. Ray keeps them and shows them to nobody."""

    config: ClusterConfig  # the model's path is absolute
    device: str  # of the workers: "cpu" or "cuda"
    secret: ClusterSecret = field(repr=False)
    home_resource: str  # of the host that clients and routers outside know by its address
    environment: Mapping[str, str]  # forwarded_environment() where it was started
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES there
    # What all processes of this Ray inherit; for other values Ray starts an interpreter first.
    inherited: Mapping[str, str] = field(default_factory=dict)


def secret_of(config: ClusterConfig) -> ClusterSecret:
    """Return the secret of the configured file, or a new one.

    Raises:
        ConfigError: The file cannot be read, or is too short or too long.
    """
    if not config.secret_file:
        return ClusterSecret.generate()
    try:
        return read_secret(Path(config.secret_file))
    except KeyFileError as error:
        raise ConfigError(f"secret_file: {error}") from error


def check_same(
    running: ClusterConfig, num_running: Mapping[str, int], asked: ClusterConfig
) -> list[str]:
    """Refuse a configuration that differs from the running cluster's.

    Numbers of workers may be those of its start, or those that it has now.

    Args:
        running: The one that it was started with.
        num_running: Workers that it has now, by pool.
        asked: The requested one.

    Returns:
        A line for each requested number of workers that it had at its start, but no longer has.

    Raises:
        ConfigError: Has a line for each option that differs, with both values.
    """
    before, now = dict(_values(running)), dict(_values(asked))
    counts = _counts(running)
    names = dict.fromkeys([*running.pools, *asked.pools])
    options = ChainMap(*(dict(pool_options(name)) for name in names), dict(config_options()))
    scaled, wrong, is_kept = [], [], False
    for path, option in options.items():
        started, wanted = before.get(path, option.default), now.get(path, option.default)
        if path in counts:
            pool, flag = counts[path]
            found = num_running.get(pool, 0)
            remedy = f"`pagewire scale {flag}{wanted}` changes that"
            if wanted != found and wanted == started:
                was_scaled = "the cluster was scaled since its start"
                scaled.append(f"{_differing(path, found, wanted)}; {was_scaled}; {remedy}")
            elif wanted != found:
                wrong.append(f"{_differing(path, found, wanted)}; {remedy}")
        elif path not in OF_THE_CALLER and started != wanted:
            wrong.append(_differing(path, started, wanted))
            is_kept = True
    if is_kept:
        wrong.append("a running cluster keeps these options; `pagewire down` ends it")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return scaled


def _differing(path: str, running: object, wanted: object) -> str:
    return f"{path}: running {_written(running)}; wanted {_written(wanted)}"


def _written(value: object) -> str:
    """Return a value as a configuration file has it, in one line."""
    if value is None:
        return "unset"
    plain = dict(value) if isinstance(value, Mapping) else value
    plain = str(plain) if isinstance(plain, Path) else plain
    text = yaml.safe_dump(plain, default_flow_style=True, width=sys.maxsize)
    return text.removesuffix("...\n").strip()


def _counts(config: ClusterConfig) -> dict[str, tuple[str, str]]:
    """Return the options that are numbers of workers: their pool, and how to change them."""
    further = {
        f"{POOLS}.{name}.workers": (pool_key(name, each), f"--pool {name}=")
        for name, each in config.pools.items()
        if each.role
    }
    return {role: (role, f"--{role} ") for role in ROLES} | further


def _values(config: ClusterConfig) -> Iterator[tuple[str, Any]]:
    """Yield all options by path."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from (
                (f"{each.name}.{own.name}", getattr(value, own.name)) for own in fields(value)
            )
        elif each.name == POOLS:
            for name, pool in value.items():
                values = {own.name: getattr(pool, own.name) for own in fields(pool)}
                values["workers"] = config.further_pools.get(pool_key(name, pool))
                yield from ((f"{POOLS}.{name}.{option}", own) for option, own in values.items())
        elif each.name == "model" and value is not None:
            yield each.name, value.resolve()
        else:
            yield each.name, value
