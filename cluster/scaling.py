"""Which workers come and which go: decided from names alone, so that it can be told in advance.

A cluster keeps a decode worker that answers, and with prefill workers it keeps one of those: the
policy of routers and the sizes of steps differ between a cluster with and one without.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from router.membership import PoolName

POOLS: tuple[PoolName, ...] = ("prefill", "decode")
MOST_WORKERS = 1024  # of a pool, as in the configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterWorkers:
    """The workers of a cluster, by name."""

    staying: frozenset[str]  # those that are not to leave, in whatever state
    leaving: frozenset[str]  # those that are to leave, or have just left
    answering: frozenset[str]  # of `staying`, those that have been heard of lately

    @property
    def counts(self) -> dict[str, int]:
        """How many stay, by pool."""
        return {pool: len(self.of(pool)) for pool in POOLS}

    def of(self, pool: PoolName) -> list[str]:
        """Return those of a pool that stay, in the order of their numbers."""
        return sorted((each for each in self.staying if pool_of(each) == pool), key=_number)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePlan:
    """What makes a cluster have the number of workers that was asked for."""

    starts: tuple[str, ...]
    drains: tuple[str, ...]


def told_counts(num_prefill: int, num_decode: int) -> str:
    """Return the numbers of workers as people read them: 2 prefill and 1 decode worker."""
    prefill = f"{num_prefill} prefill and " if num_prefill else ""
    return f"{prefill}{num_decode} decode worker{'' if num_decode == 1 else 's'}"


def worker_ids(num_prefill: int, num_decode: int) -> list[str]:
    """Return the names of a new cluster's workers, prefill first."""
    prefill = [f"prefill-{index}" for index in range(num_prefill)]
    return prefill + [f"decode-{index}" for index in range(num_decode)]


def pool_of(worker_id: str) -> PoolName:
    """Return the pool of a worker's name."""
    return "prefill" if worker_id.startswith("prefill") else "decode"


def is_worker(name: str) -> bool:
    """Return whether the name of an actor is that of a worker."""
    pool, _, number = name.partition("-")
    return pool in POOLS and number.isdigit()


def plan_scale(
    workers: ClusterWorkers, config: ClusterConfig, device: str, wanted: dict[PoolName, int]
) -> ScalePlan:
    """Return what is to start and what is to leave; the highest numbers leave.

    Args:
        workers: That the cluster has.
        config: It was started with.
        device: "cpu" or "cuda".
        wanted: By pool, how many; a pool that is absent stays as it is.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    starts: list[str] = []
    drains: list[str] = []
    for pool, number in wanted.items():
        found = workers.of(pool)
        least = 1 if pool == "decode" or found else 0
        most = MOST_WORKERS if pool == "decode" or found else 0
        if not least <= number <= most:
            raise ConfigError(
                f"--{pool} is {number}; it must be {_range(least, most)}: {_reason(pool, found)}"
            )
        if number > len(found):
            taken = workers.staying | workers.leaving
            names = (f"{pool}-{index}" for index in itertools.count())
            free = (name for name in names if name not in taken)
            starts += itertools.islice(free, number - len(found))
        drains += found[number:]
    if starts and device == "cuda" and config.workers_per_gpu > 1:
        raise ConfigError(
            f"workers_per_gpu is {config.workers_per_gpu}; to add workers to a running cluster it "
            "must be 1, because each has its GPU from the start"
        )
    for pool in POOLS:
        if gone := [each for each in drains if pool_of(each) == pool]:
            _check_remaining(workers, pool, gone)
    return ScalePlan(starts=tuple(starts), drains=tuple(drains))


def check_drain(workers: ClusterWorkers, worker_id: str) -> None:
    """Refuse to let a worker go that is unknown, or without which nothing would be served.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    if worker_id not in workers.staying | workers.leaving:
        names = ", ".join([*workers.of("prefill"), *workers.of("decode")])
        raise ConfigError(f"WORKER is {worker_id!r}; it must be one of {names}")
    if worker_id in workers.staying:
        _check_remaining(workers, pool_of(worker_id), [worker_id])


def check_restart(workers: ClusterWorkers, worker_id: str) -> None:
    """Refuse to restart a worker that is unknown, leaves or does not serve now.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    if worker_id in workers.leaving:
        raise ConfigError(f"NAME is {worker_id!r}, which is to leave; nothing has changed")
    if worker_id not in workers.staying:
        names = ", ".join([*workers.of("prefill"), *workers.of("decode")])
        raise ConfigError(f"NAME is {worker_id!r}; it must be one of {names}")
    if worker_id not in workers.answering:
        raise ConfigError(
            f"NAME is {worker_id!r}, which has not been heard of lately; it begins anew by "
            "itself when it can; see `pagewire status`"
        )


def _check_remaining(workers: ClusterWorkers, pool: PoolName, gone: Collection[str]) -> None:
    found = workers.of(pool)
    named = " and ".join(gone)
    if len(gone) == len(found):
        raise ConfigError(
            f"{named} cannot be drained: {_reason(pool, found)}; add one first with "
            f"`pagewire scale --{pool} {len(found) + 1}`"
        )
    others = [each for each in found if each not in gone]
    if not workers.answering.intersection(others):
        raise ConfigError(
            f"{named} cannot be drained now: of the {pool} workers that would remain, "
            f"{', '.join(others)}, none has been heard of lately; see `pagewire status`"
        )


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _reason(pool: PoolName, found: Collection[str]) -> str:
    if pool == "prefill" and not found:
        return "the cluster was started without prefill workers; to change that, start it anew"
    if pool == "prefill":
        return "the last prefill worker must stay; to do without, start the cluster anew"
    return "the last decode worker must stay, or nothing is served"


def _number(worker_id: str) -> int:
    return int(worker_id.partition("-")[2])
