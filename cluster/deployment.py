"""What a cluster is started from, whenever one of its processes is: kept by its controller."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_options import config_options
from cluster.errors import ConfigError
from credentials.secret import ClusterSecret

# Of whoever starts a cluster or asks for it, not of the cluster.
OF_THE_CALLER = {"ray_address", "start_timeout_s"}
COUNTS = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """Everything that its processes are started with. Ray keeps it, and gives it to nobody."""

    config: ClusterConfig  # the model's path is absolute
    device: str  # of the workers: "cpu" or "cuda"
    secret: ClusterSecret = field(repr=False)
    home_resource: str  # of the host that clients and routers outside know by its address
    environment: Mapping[str, str]  # forwarded_environment() where it was started
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES there


def check_same(
    running: ClusterConfig, num_running: Mapping[str, int], asked: ClusterConfig
) -> None:
    """Refuse a configuration that is not the running cluster's.

    Args:
        running: What it was started with.
        num_running: Workers that it has now, by pool.
        asked: What it should be.

    Raises:
        ConfigError: Has a line for each option that differs, with both values.
    """
    before, now = dict(_values(running)), dict(_values(asked))
    wrong = []
    for path in config_options():
        if path in OF_THE_CALLER or before[path] == now[path]:
            continue
        if path in COUNTS and now[path] == num_running[path]:
            continue
        remedy = "`pagewire down` ends it"
        if path in COUNTS:
            remedy = f"`pagewire scale --{path} {now[path]}` changes that"
        found = num_running[path] if path in COUNTS else before[path]
        wrong.append(f"{path} is {now[path]}; the running cluster has {found}; {remedy}")
    if wrong:
        raise ConfigError("\n".join(wrong))


def _values(config: ClusterConfig) -> Iterator[tuple[str, Any]]:
    """Yield all options by path."""
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            yield from (
                (f"{each.name}.{own.name}", getattr(value, own.name)) for own in fields(value)
            )
        elif each.name == "model" and value is not None:
            yield each.name, value.resolve()
        else:
            yield each.name, value
