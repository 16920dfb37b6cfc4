"""Options of one pool: the workers of a role that are alike.

There are the pools `prefill` and `decode`, and any number that the section `pools` names, each of
one of these roles. The workers of a pool named `small` are decode-small-0, decode-small-1 ...
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from options.kept_by_name import kept_by_name
from options.option import OptionName, WrongOption, check_options, option
from router.membership import WorkerRole

# And the names of their first pools.
ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
SECTION = "pools"
NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
ACCEPTED_NAME = "a lower-case letter, then at most 31 lower-case letters, digits and underscores"
MOST_WORKERS = 1024  # of a pool
_RAYS_OWN = {"CPU", "GPU", "memory", "object_store_memory"}


def _are_resources(resources: Any) -> bool:
    """Return whether Ray accepts these amounts and a worker may request them."""
    return resources is None or (
        isinstance(resources, Mapping)
        and all(isinstance(name, str) and name and name not in _RAYS_OWN for name in resources)
        and all(
            type(each) in (int, float) and 0.0001 <= each <= 1e6 and (each < 1 or each == int(each))
            for each in resources.values()
        )
    )


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """The needs of a pool's workers, and their differences from other pools."""

    role: str = option(
        "",
        "What its workers do: prefill or decode. Not for the pools prefill and decode.",
        accepts=lambda role: role in ("", *ROLES),
        accepted="prefill or decode",
    )
    workers: int | None = option(
        None,
        "Number of its workers at the start, by default 1. Not for the pools prefill and "
        "decode, which have options of these names.",
        at_least=1,
        at_most=MOST_WORKERS,
    )
    accelerator_type: str = option(
        "",
        "Kind of the GPUs that its workers run on, as Ray calls it: H100, A100, L4.",
        accepts=lambda kind: isinstance(kind, str) and bool(re.fullmatch(r"[\w.-]*", kind)),
        accepted="the name that Ray has for a kind of GPU, as in H100",
    )
    resources: Mapping[str, float] | None = option(
        None,
        "Custom resources of Ray that each of its workers takes of a host, and the amount of each. "
        "An amount below 0.01 only marks suitable hosts.",
        accepts=_are_resources,
        accepted="a mapping of custom resources of Ray (not CPU, GPU or memory) to amounts of "
        "0.0001 or more, whole from 1 on, as in rack-a: 0.001",
    )
    num_pages: int | None = option(
        None, "Pages of each of its workers, instead of num_pages.", at_least=0
    )
    gpu_memory_fraction: float | None = option(
        None,
        "Share of GPU memory for pages of its workers, instead of gpu_memory_fraction.",
        above=0,
        at_most=1,
    )
    cpu_pages_mib: int | None = option(
        None,
        "Memory for pages of each of its workers, MiB, instead of cpu_pages_mib.",
        at_least=1,
    )
    max_step_tokens: int | None = option(
        None,
        "Tokens that its workers compute in one step, instead of max_step_tokens of prefill_worker "
        "or decode_worker.",
        at_least=1,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts that each worker takes of a host besides its GPU, by resource of Ray."""
        kind = {f"accelerator_type:{self.accelerator_type}": 0.001} if self.accelerator_type else {}
        return {**kind, **{name: float(each) for name, each in (self.resources or {}).items()}}


def pool_of(worker_id: str) -> str:
    """Return the key of the pool of a worker, by its name alone; see pool_key."""
    return worker_id.rpartition("-")[0]


def role_of(name: str) -> WorkerRole:
    """Return the role of a worker or of a pool, by its name or key alone."""
    return "prefill" if name.startswith("prefill") else "decode"


def pool_key(name: str, pool: PoolConfig) -> str:
    """Return the prefix of the names of a pool's workers: "decode" or "decode-small"."""
    return name if name in ROLES else f"{pool.role}-{name}"


def pool_problems(
    pools: Mapping[str, PoolConfig],
    *,
    num_prefill: int,
    ray_address: str,
    device: str,
    workers_per_gpu: int,
    max_running_sequences: int,
) -> Iterator[WrongOption]:
    """Yield problems of a configuration's pools, other than single values."""
    for name, pool in pools.items():
        path = f"{SECTION}.{name}"
        if not NAME.fullmatch(name):
            # All of its options are blamed, so that no other problem of the pool is told.
            told = "{}: found the pool name {!r}; allowed: {}"
            yield WrongOption(told, OptionName(path), name, ACCEPTED_NAME)
            continue
        yield from _role_problems(name, pool, path, num_prefill, workers_per_gpu)
        is_decode = "decode" in (name, pool.role)
        if is_decode and pool.max_step_tokens and pool.max_step_tokens <= max_running_sequences:
            yield WrongOption(
                "{}: found {!r}; allowed: more than {}, which is {!r}",
                OptionName(f"{path}.max_step_tokens"),
                pool.max_step_tokens,
                OptionName("decode_worker.max_running_sequences"),
                max_running_sequences,
            )
        for option_name in ("accelerator_type", "resources"):
            if not ray_address and (value := getattr(pool, option_name)):
                yield WrongOption(
                    "{}: found {!r}; allowed: none without {}, because all workers are on one host",
                    OptionName(f"{path}.{option_name}"),
                    value,
                    OptionName("ray_address"),
                )
        if pool.accelerator_type and device == "cpu":
            yield WrongOption(
                "{}: found {!r}; allowed: none with {} cpu",
                OptionName(f"{path}.accelerator_type"),
                pool.accelerator_type,
                OptionName("device"),
            )


def _role_problems(
    name: str, pool: PoolConfig, path: str, num_prefill: int, workers_per_gpu: int
) -> Iterator[WrongOption]:
    """Yield problems of what a pool says of its workers' role, or of their number."""
    role = OptionName(f"{path}.role")
    if name == "prefill" and num_prefill == 0:
        told = "{}: found options; allowed: none with {} 0, because this pool has no workers"
        yield WrongOption(told, OptionName(path), OptionName("prefill"))
    elif name in ROLES:
        for option_name, remedy in (("role", "its name"), ("workers", f"the option {name}")):
            if value := getattr(pool, option_name):
                told = "{}: found {!r}; allowed: none, because {} says it"
                yield WrongOption(told, OptionName(f"{path}.{option_name}"), value, remedy)
    elif not pool.role:
        yield WrongOption("{}: found none; allowed: prefill or decode", role)
    elif workers_per_gpu > 1:
        told = "{}: found {!r}; allowed: no further pools with {} above 1"
        yield WrongOption(told, role, pool.role, OptionName("workers_per_gpu"))
    elif pool.role == "prefill" and num_prefill == 0:
        yield WrongOption(
            "{}: found 'prefill'; allowed: decode with {} 0, which means that there are no "
            "prefill workers",
            role,
            OptionName("prefill"),
        )
