"""Decides which workers start and leave, from names and who answers: the outcome is predictable.

A cluster keeps a decode worker that answers, and a prefill worker if it has any: the policy of
routers and the sizes of steps differ between clusters with and without prefill workers.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.pool_config import MOST_WORKERS, NAME, ROLES, pool_key, pool_of, role_of
from cluster.port_need import check_port_ranges
from options.kept_by_name import kept_by_name

WORKER = re.compile(rf"({'|'.join(ROLES)})(-{NAME.pattern})?-\d+")


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterWorkers:
    """The workers of a cluster, by name."""

    staying: frozenset[str]  # workers that are not to leave, in any state
    leaving: frozenset[str]  # workers that are to leave, or have just left
    # those of `staying` that announced themselves lately, and do not end for a restart
    answering: frozenset[str]

    @property
    def counts(self) -> dict[str, int]:
        """How many stay, by pool; for prefill and decode even if none does."""
        return dict.fromkeys(ROLES, 0) | Counter(map(pool_of, self.staying))

    @property
    def names(self) -> list[str]:
        """The names of staying workers, prefill first, in the order of pools and numbers."""
        return [each for role in ROLES for each in self.of_role(role)]

    def of(self, pool: str) -> list[str]:
        """Return the staying workers of a pool, in the order of their numbers."""
        return sorted((each for each in self.staying if pool_of(each) == pool), key=_order)

    def of_role(self, role: str) -> list[str]:
        """Return the staying workers of a role, in the order of pools and numbers."""
        return sorted((each for each in self.staying if role_of(each) == role), key=_order)


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalePlan:
    """The changes that give a cluster the requested numbers of workers."""

    starts: tuple[str, ...]
    drains: tuple[str, ...]
    waiting: str = ""  # says which of `starts` wait for a host with room


def told_workers(names: Collection[str]) -> str:
    """Return in words how many workers these are."""
    num_prefill = sum(role_of(each) == "prefill" for each in names)
    return told_counts(num_prefill, len(names) - num_prefill)


def told_counts(num_prefill: int, num_decode: int) -> str:
    """Return the numbers of workers in words: 2 prefill and 1 decode worker."""
    prefill = f"{num_prefill} prefill and " if num_prefill else ""
    return f"{prefill}{num_decode} decode worker{'' if num_decode == 1 else 's'}"


def worker_ids(pools: Mapping[str, int]) -> list[str]:
    """Return the names of a new cluster's workers.

    Args:
        pools: Key of a pool |-> number of its workers, in the order of the names.
    """
    return [f"{pool}-{index}" for pool, number in pools.items() for index in range(number)]


def is_worker(name: str) -> bool:
    """Return whether the name of an actor is that of a worker."""
    return WORKER.fullmatch(name) is not None


def find_pool(config: ClusterConfig, name: str, flag: str) -> str:
    """Return the key of a pool that a flag names.

    Raises:
        ConfigError: There is no pool of that name.
    """
    if name in ROLES:
        return name
    if name not in config.pools:
        names = ", ".join(dict.fromkeys([*ROLES, *config.pools]))
        raise ConfigError(f"{flag}: found {name!r}; allowed: {names}")
    return pool_key(name, config.pools[name])


def plan_scale(
    workers: ClusterWorkers, config: ClusterConfig, device: str, wanted: Mapping[str, int]
) -> ScalePlan:
    """Return the workers that start and leave.

    First those leave that have not been heard from lately, then those with the highest numbers.

    Args:
        workers: The workers of the cluster.
        config: The one that it was started with.
        device: "cpu" or "cuda".
        wanted: Key of a pool |-> number; an absent pool stays as it is.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    starts: list[str] = []
    drains: list[str] = []
    for pool, number in wanted.items():
        found, role = workers.of(pool), role_of(pool)
        of_role = workers.of_role(role)
        is_without = role == "prefill" and not of_role
        least = 0 if is_without or len(of_role) > len(found) else 1
        most = 0 if is_without else MOST_WORKERS
        if not least <= number <= most:
            has_reason = is_without or (least == 1 and number < 1)
            because = f", because {_reason(role, of_role)}" if has_reason else ""
            raise ConfigError(
                f"{_flag(pool)}: found {number}; allowed: {_range(least, most)}{because}"
            )
        if number > len(found):
            starts += itertools.islice(_free_names(workers, pool), number - len(found))
        drains += sorted(found, key=lambda each: each not in workers.answering)[number:]
    if starts and device == "cuda" and config.workers_per_gpu > 1:
        raise ConfigError(
            f"workers_per_gpu: found {config.workers_per_gpu}; allowed: 1 where workers join a "
            "running cluster, because each has its GPU from the start"
        )
    for role in ROLES:
        if gone := [each for each in drains if role_of(each) == role]:
            asked = {_flag(each): str(wanted[each]) for each in dict.fromkeys(map(pool_of, gone))}
            _check_remaining(workers, role, gone, ", ".join(asked), " and ".join(asked.values()))
    if starts and not config.ray_address:
        roles = Counter(map(role_of, [*workers.staying, *starts]))
        check_port_ranges(config, device, roles["prefill"], roles["decode"])
    return ScalePlan(starts=tuple(starts), drains=tuple(drains))


def plan_move(
    workers: ClusterWorkers, config: ClusterConfig, device: str, worker_id: str, pool: str
) -> str:
    """Return the name of the worker of another pool that takes the place of a leaving one.

    Args:
        workers: The workers of the cluster.
        config: The one that it was started with.
        device: "cpu" or "cuda".
        worker_id: The worker that leaves.
        pool: The key of the other pool.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    _check_known(workers, "WORKER", worker_id)
    to = pool if pool in ROLES else pool.partition("-")[2]
    if pool_of(worker_id) == pool:
        raise ConfigError(
            f"--to: found {to!r}, where {worker_id} is already; allowed: another pool; nothing has "
            "changed"
        )
    if role_of(pool) == "prefill" and not workers.of_role("prefill"):
        raise ConfigError(
            f"--to: found {to!r}; allowed: a pool of decode workers, because "
            f"{_reason('prefill', ())}"
        )
    if device == "cuda" and config.workers_per_gpu > 1:
        raise ConfigError(
            f"workers_per_gpu: found {config.workers_per_gpu}; allowed: 1 where workers move, "
            "because each has its GPU from the start"
        )
    if worker_id not in workers.answering:
        raise ConfigError(
            f"WORKER: found {worker_id!r}, which has not been heard from lately; allowed: a worker "
            "that serves; see `pagewire status`"
        )
    if len(workers.of(pool)) == MOST_WORKERS:
        raise ConfigError(
            f"--to: found {to!r}, which has {MOST_WORKERS} workers; allowed: a pool with fewer"
        )
    _check_remaining(workers, role_of(worker_id), [worker_id], "WORKER", repr(worker_id))
    return next(_free_names(workers, pool))


def check_drain(workers: ClusterWorkers, worker_id: str) -> None:
    """Refuse to remove an unknown worker, or one without which nothing would be served.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    if worker_id not in workers.staying | workers.leaving:
        names = ", ".join(workers.names)
        raise ConfigError(f"WORKER: found {worker_id!r}; allowed: {names}")
    if worker_id in workers.staying:
        _check_remaining(workers, role_of(worker_id), [worker_id], "WORKER", repr(worker_id))


def check_restart(workers: ClusterWorkers, worker_id: str) -> None:
    """Refuse to restart a worker that is unknown, leaving or not serving, or the last that serves.

    The only worker of its role may restart: there is nobody to wait for.

    Raises:
        ConfigError: Says what was found, what is allowed, and that nothing has changed.
    """
    _check_known(workers, "NAME", worker_id)
    if worker_id not in workers.answering:
        raise ConfigError(
            f"NAME: found {worker_id!r}, which has not been heard from lately; allowed: a worker "
            "that serves; this one restarts by itself when it can; see `pagewire status`"
        )
    role = role_of(worker_id)
    others = [each for each in workers.of_role(role) if each != worker_id]
    if others and not workers.answering.intersection(others):
        raise ConfigError(
            f"NAME: found {worker_id!r}, the last {role} worker that serves now, while "
            f"{', '.join(others)} cannot; allowed: a worker beside which another one serves; wait "
            "until another one does, or drain the others first"
        )


def _check_known(workers: ClusterWorkers, argument: str, worker_id: str) -> None:
    """Refuse an argument that names an unknown or leaving worker."""
    if worker_id in workers.leaving or worker_id not in workers.staying:
        names = ", ".join(each for each in workers.names if each not in workers.leaving)
        leaves = ", which is leaving" if worker_id in workers.leaving else ""
        raise ConfigError(f"{argument}: found {worker_id!r}{leaves}; allowed: {names}")


def _check_remaining(
    workers: ClusterWorkers, role: str, gone: Collection[str], arguments: str, found: str
) -> None:
    """Refuse what was found in arguments if without `gone` no worker of a role serves."""
    of_role = workers.of_role(role)
    others = [each for each in of_role if each not in gone]
    if not others:
        raise ConfigError(
            f"{arguments}: found {found}; allowed: what leaves a {role} worker, because "
            f"{_reason(role, of_role)}; add one first with "
            f"`pagewire scale --{role} {len(workers.of(role)) + 1}`"
        )
    if not workers.answering.intersection(others):
        raise ConfigError(
            f"{arguments}: found {found}; allowed: what leaves a {role} worker that serves, "
            f"because {', '.join(others)} would remain, and nothing has been heard from there "
            "lately; see `pagewire status`"
        )


def _free_names(workers: ClusterWorkers, pool: str) -> Iterator[str]:
    """Yield the unused names of a pool, by number."""
    taken = workers.staying | workers.leaving
    names = (f"{pool}-{index}" for index in itertools.count())
    return (name for name in names if name not in taken)


def _flag(pool: str) -> str:
    """Return a pool's name on the command line."""
    return f"--{pool}" if pool in ROLES else f"--pool {pool.partition('-')[2]}"


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _reason(role: str, found: Collection[str]) -> str:
    if role == "prefill" and not found:
        return "the cluster was started without prefill workers; to change that, start it again"
    if role == "prefill":
        return (
            "the last prefill worker must stay; to do without it, `pagewire down`, then "
            "`pagewire up --prefill 0`"
        )
    return "the last decode worker must stay, or nothing is served"


def _order(worker_id: str) -> tuple[bool, str, int]:
    """Return the place of a worker in lists: pools in order, their numbers as numbers."""
    pool, _, number = worker_id.rpartition("-")
    return pool not in ROLES, pool, int(number)
