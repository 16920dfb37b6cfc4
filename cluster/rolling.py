"""Restarts the processes of a running cluster, one after another, while it serves."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from cluster.attach import ask, check_log_room, named_actors
from cluster.controller import ClusterFacts, Contracts
from cluster.errors import ClusterError, ConfigError, StartError
from cluster.host_looks import LOOK_TIMEOUT_S
from cluster.interruption import NOTHING_CHANGED, told_at_interrupt
from cluster.placement import CONTROL_GROUP, GATEWAY_NAME, ROUTER_NAME, gateways
from cluster.scaling import check_restart, is_worker
from protos.contract import contract_difference

LOOK_PERIOD_S = 0.2
ANSWER_TIMEOUT_S = 10.0

Say = Callable[[str], None]


def restart_cluster(controller: Any, names: Sequence[str], grace_s: float | None, say: Say) -> None:
    """Restart processes, one after another; each serves before the next one ends.

    Another HTTP gateway takes over from the running one, so it always serves.

    Args:
        controller: Handle of the cluster's controller.
        names: Names of workers, router and HTTP gateway, in this order; empty: all of them.
        grace_s: Seconds for running requests of each; None: the cluster's stop_grace_s.
        say: Gets progress.

    Raises:
        ClusterError: The problem and the remedy; remaining processes stay as they are.
        Interrupted: By Ctrl-C; the process that is ending still restarts.
    """
    with told_at_interrupt(NOTHING_CHANGED):
        check_log_room()
        facts: ClusterFacts = ask(controller.facts.remote())
    workers = facts.workers
    actors = named_actors()
    fronts = [ROUTER_NAME] * (ROUTER_NAME in actors) + [GATEWAY_NAME] * bool(gateways(actors))
    names = names or [*workers.names, *fronts]
    known = [*workers.names, *fronts]
    for name in names:
        if name not in (*known, *workers.leaving):
            raise ConfigError(f"NAME: found {name!r}; allowed: {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(f"NAME: found {name!r} twice; allowed: each name once")
        if is_worker(name):
            check_restart(workers, name)
        if name == GATEWAY_NAME and not hasattr(controller, "succeed_gateway"):
            raise StartError(
                f"{name}: the cluster's controller runs older code, which cannot replace it; "
                "nothing has changed; name the other processes, or use `pagewire down` and `up`"
            )
    with told_at_interrupt(NOTHING_CHANGED):
        contracts: Contracts = ask(
            controller.contract_versions.remote(), LOOK_TIMEOUT_S + ANSWER_TIMEOUT_S
        )
    _check_contracts(contracts)
    _check_files(contracts, names)
    grace_s = facts.config.stop_grace_s if grace_s is None else grace_s
    for number, name in enumerate(names, 1):
        with told_at_interrupt(f"{name} restarts by itself; the others are unchanged"):
            began = time.monotonic()
            does = "serves again"
            if name == GATEWAY_NAME:
                does = "has been replaced"
                say(f"another {name} starts; then requests of this one have {grace_s:g} s to end")
                start_s = facts.config.start_timeout_s + ANSWER_TIMEOUT_S
                ask(controller.succeed_gateway.remote(grace_s), start_s)
            else:
                say(f"{name} takes no new requests; running ones have {grace_s:g} s to end there")
                deadline = began + grace_s + facts.config.start_timeout_s
                restart = _restart_worker if is_worker(name) else _restart_router
                restart(controller, name, grace_s, deadline)
            seconds = time.monotonic() - began
            say(f"{name} {does} after {seconds:.0f} s, {number} of {len(names)}")


def _check_contracts(contracts: Contracts) -> None:
    """Refuse code that could not serve with any running worker."""
    wrong = [
        f"{host}: {contract_difference(version, contracts.running[0])}"
        for host, version in contracts.to_start.items()
        if contracts.running and version not in contracts.running
    ]
    if wrong:
        told = (
            "the code of these hosts cannot serve together with the running workers; nothing has "
            "changed; start this code with `pagewire down` and `up`, or in a second cluster"
        )
        raise StartError("\n".join([*wrong, told]))


def _check_files(contracts: Contracts, names: Sequence[str]) -> None:
    """Refuse to end processes whose successors could not use the files of TLS as they are now."""
    # One host's file is wrong for each process there.
    wrong = dict.fromkeys(line for name in names for line in contracts.problems.get(name, ()))
    if wrong:
        affected = ", ".join(name for name in names if name in contracts.problems)
        told = (
            f"{affected} could not start again with these files; nothing has changed, and running "
            "processes keep what was right before; mend the files, then try again"
        )
        raise StartError("\n".join([*wrong, told]))


def _restart_worker(controller: Any, name: str, grace_s: float, deadline: float) -> None:
    ending: int = ask(controller.restart.remote(name, grace_s))
    _wait(name, deadline, lambda: _serves_again(name, ending))


def _restart_router(controller: Any, name: str, grace_s: float, deadline: float) -> None:
    try:
        actor = ray.get_actor(name)
    except ValueError:
        raise _left(name) from None
    before = _pid(actor)
    ask(actor.restart.remote(grace_s))
    _wait(name, deadline, lambda: _pid(actor) not in (None, before))


def _wait(name: str, deadline: float, is_back: Callable[[], bool]) -> None:
    while not is_back():
        if name not in ray.util.list_named_actors():  # Ray keeps one that it starts again
            raise _left(name)
        if time.monotonic() >= deadline:
            raise StartError(
                f"{name} has not come back in time; Ray keeps trying to start it, and the others "
                "are unchanged; see `pagewire status` and its log"
            )
        time.sleep(LOOK_PERIOD_S)


def _left(name: str) -> StartError:
    return StartError(
        f"{name} has left the cluster meanwhile, by another command; the others are as they were; "
        "see `pagewire status`"
    )


def _serves_again(name: str, ending: int) -> bool:
    """Return whether the router sees another start of a worker ready than the one that ends.

    Raises:
        StartError: The router cannot use it; waiting would not help.
    """
    try:
        router = ray.get_actor(ROUTER_NAME)
        ready: dict[str, int] = ask(router.ready_workers.remote())
        misfits: dict[str, str] = ask(router.misfits.remote())
    except (ClusterError, ValueError):  # it restarts
        return False
    if ready.get(name, ending) != ending:
        return True
    if misfit := misfits.get(name):
        raise StartError(
            f"{name} has restarted and gets no requests from this router: {misfit}; the others are "
            "unchanged"
        )
    return False


def _pid(actor: Any) -> int | None:
    """Return the process of an actor that serves; None: it does not, or does not answer."""
    try:
        ask(actor.wait_ready.remote(), ANSWER_TIMEOUT_S)
        return int(ask(actor.pid.options(concurrency_group=CONTROL_GROUP).remote()))
    except ClusterError:
        return None
