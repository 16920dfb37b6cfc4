"""Adds and removes workers of a running cluster, and waits for the result."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import ray

from cluster.attach import ASK_TIMEOUT_S, ask, check_log_room, router_address
from cluster.certificates import own_client
from cluster.config import ClusterConfig
from cluster.controller import ClusterFacts
from cluster.errors import ClusterError, StartError
from cluster.host_looks import LOOK_TIMEOUT_S
from cluster.interruption import NOTHING_CHANGED, told_at_interrupt
from cluster.placement import ROUTER_NAME
from cluster.ray_actors import workers_on
from cluster.readiness import wait_ready, wait_until_served
from cluster.scaling import ScalePlan, find_pool, told_workers

LEAVE_MARGIN_S = 45.0  # beyond the grace: to close connections, and a start that drains at its end
CHANGE_TIMEOUT_S = ASK_TIMEOUT_S + LOOK_TIMEOUT_S  # hosts look at their files first
LOOK_PERIOD_S = 0.1
FORGET_TIMEOUT_S = 5.0
SHOWN = "`pagewire status` shows it"
CONTINUES = f"what has begun continues; {SHOWN}"

Say = Callable[[str], None]


def scale_cluster(
    controller: Any, wanted: Mapping[str, int], grace_s: float | None, say: Say
) -> None:
    """Set the numbers of workers; return when new ones serve and leaving ones are gone.

    Args:
        controller: Handle of the cluster's controller.
        wanted: Name of a pool |-> number; an absent pool stays as it is.
        grace_s: Seconds for running requests of leaving workers; None: the cluster's stop_grace_s.
        say: Gets progress.

    Raises:
        ClusterError: The problem and the remedy. A worker that does not start is removed.
        Interrupted: By Ctrl-C; leaving workers still leave.
    """
    facts, grace_s = _facts_and_grace(controller, grace_s)
    with told_at_interrupt(CONTINUES):
        by_key = {find_pool(facts.config, name, "--pool"): each for name, each in wanted.items()}
        if any(each > facts.workers.counts.get(key, 0) for key, each in by_key.items()):
            check_log_room()
        actors, plan = ask(controller.scale.remote(by_key, grace_s), CHANGE_TIMEOUT_S)
    with told_at_interrupt(_goes_on(plan)):
        if plan.starts:
            say(f"starting {', '.join(plan.starts)}")
        if plan.waiting:
            say(plan.waiting)
        if plan.drains:
            say(_draining(plan.drains, grace_s))
        if plan.starts:
            with told_at_interrupt(_goes_on(plan, ended=plan.starts)):
                try:
                    _wait_served(actors, facts.config, say)
                except ClusterError as error:
                    _end(controller, actors)
                    raise StartError(f"{error}\n{_goes_on(plan, ended=plan.starts)}") from error
                except BaseException:
                    _end(controller, actors)
                    raise
        _wait_gone(_listed(plan.drains), grace_s)
    _say_workers(controller, say)


def drain_worker(controller: Any, worker_id: str, grace_s: float | None, say: Say) -> None:
    """Let a worker go; return when it is gone.

    Raises:
        ClusterError: The problem and the remedy.
        Interrupted: By Ctrl-C; the worker still leaves.
    """
    _, grace_s = _facts_and_grace(controller, grace_s)
    with told_at_interrupt(_goes_on(ScalePlan(starts=(), drains=(worker_id,)))):
        ask(controller.drain.remote(worker_id, grace_s))
        say(_draining([worker_id], grace_s))
        _wait_gone(_listed([worker_id]), grace_s)
    say(f"{worker_id} has left")


def drain_host(controller: Any, grace_s: float | None, say: Say) -> None:
    """Drain all workers of this process's host; return when none is left there.

    They start elsewhere as soon as there is room; this host gets no new ones.

    Raises:
        ClusterError: The problem and the remedy.
        Interrupted: By Ctrl-C; the workers still leave.
    """
    node_id = ray.get_runtime_context().get_node_id()
    _, grace_s = _facts_and_grace(controller, grace_s)
    with told_at_interrupt(CONTINUES):
        names = ask(controller.evacuate.remote(node_id, grace_s))
        if names:
            say(_draining(sorted(names), grace_s))
        _wait_gone(lambda: names & workers_on(node_id), grace_s)
    say("this host has no worker, and gets no new ones")


def move_worker(
    controller: Any, worker_id: str, pool: str, grace_s: float | None, say: Say
) -> None:
    """Have a worker leave, and one of another pool take its place; return when that one serves.

    Args:
        controller: Handle of the cluster's controller.
        worker_id: The worker that leaves.
        pool: The name of the pool that gets one more.
        grace_s: Seconds for running requests of that worker; None: the cluster's stop_grace_s.
        say: Gets progress.

    Raises:
        ClusterError: The problem and the remedy. A worker that does not start is removed.
        Interrupted: By Ctrl-C; both changes continue.
    """
    facts, grace_s = _facts_and_grace(controller, grace_s)
    key = find_pool(facts.config, pool, "--to")
    with told_at_interrupt(CONTINUES):
        check_log_room()
        name, actor = ask(controller.move.remote(worker_id, key, grace_s), CHANGE_TIMEOUT_S)
    with told_at_interrupt(f"{worker_id} is still leaving, and {name} then starts; {SHOWN}"):
        say(_draining([worker_id], grace_s))
        _wait_gone(_listed([worker_id]), grace_s)
        say(f"starting {name} in its place")
        try:
            _wait_served({name: actor}, facts.config, say)
        except ClusterError as error:
            _end(controller, {name: actor})
            raise StartError(
                f"{worker_id} has left, but {name} has not taken its place: {error}"
            ) from error
    _say_workers(controller, say)


def _end(controller: Any, actors: Mapping[str, Any]) -> None:
    """End new workers for good, even while the controller is away."""
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    with suppress(ray.exceptions.RayError):
        ray.get(controller.forget.remote(tuple(actors)), timeout=FORGET_TIMEOUT_S)


def _facts_and_grace(controller: Any, grace_s: float | None) -> tuple[ClusterFacts, float]:
    """Return the cluster's facts, and the grace, by default its stop_grace_s."""
    with told_at_interrupt(NOTHING_CHANGED):
        facts: ClusterFacts = ask(controller.facts.remote())
    return facts, facts.config.stop_grace_s if grace_s is None else grace_s


def _say_workers(controller: Any, say: Say) -> None:
    facts: ClusterFacts = ask(controller.facts.remote())
    say(f"the cluster has {told_workers(facts.workers.staying)}")


def _goes_on(plan: ScalePlan, ended: Collection[str] = ()) -> str:
    """Describe the rest of a plan after its command was interrupted."""
    parts = [
        f"{', '.join(names)} {one if len(names) == 1 else many}"
        for names, one, many in (
            (ended, "is ended again", "are ended again"),
            (plan.drains, "is still leaving", "are still leaving"),
        )
        if names
    ]
    return "; ".join([*(parts or [NOTHING_CHANGED]), SHOWN])


def _draining(names: Collection[str], grace_s: float) -> str:
    what = "takes no new requests and leaves"
    if len(names) > 1:
        what = "take no new requests and leave"
    return f"{', '.join(names)} {what}; running requests have {grace_s:g} s to end there"


def _wait_served(actors: dict[str, Any], config: ClusterConfig, say: Say) -> None:
    deadline = time.monotonic() + config.start_timeout_s
    wait_ready(actors, deadline, config.start_timeout_s, say, lambda: None)
    router = ray.get_actor(ROUTER_NAME)
    wait_until_served(
        router_address(), own_client(config.tls_settings), router, actors, deadline, lambda: None
    )


def _listed(names: Collection[str]) -> Callable[[], Collection[str]]:
    """Return a function that tells which of these workers Ray still has."""
    return lambda: set(names).intersection(ray.util.list_named_actors())


def _wait_gone(remaining: Callable[[], Collection[str]], grace_s: float) -> None:
    deadline = time.monotonic() + grace_s + LEAVE_MARGIN_S
    while left := remaining():
        if time.monotonic() >= deadline:
            raise StartError(
                f"{', '.join(sorted(left))} did not leave within {grace_s + LEAVE_MARGIN_S:.0f} s; "
                "still trying; see `pagewire status`"
            )
        time.sleep(LOOK_PERIOD_S)
