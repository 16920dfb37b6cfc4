"""Waits until a cluster's processes are ready; otherwise names the missing ones and the reason."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import ray

from cluster.attach import ask
from cluster.errors import StartError
from cluster.placement import told_name
from cluster.ray_sessions import session_logs
from llm_engine.load_progress import ReportLoaded
from observability.last_line import last_line
from pagewire import Client, ClusterStatus, PagewireError, Tls

STATUS_PERIOD_S = 0.1
CHECK_PERIOD_S = 0.2  # between two checks whether the start was given up
ANSWER_TIMEOUT_S = 30.0  # for a router that serves


class LoadWatch:
    """Asks the controller for the progress of weights, and never waits for its answer."""

    def __init__(self, controller: Any, show_loaded: ReportLoaded) -> None:
        self._controller = controller
        self._show_loaded = show_loaded
        self._call = controller.loaded.remote()

    def look(self) -> None:
        """Show the latest answer, if one has come, and ask again."""
        done, _ = ray.wait([self._call], timeout=0)
        if not done:
            return
        with suppress(ray.exceptions.RayError):  # a restarted controller gets new reports
            self._show_loaded(*ray.get(self._call))
        self._call = self._controller.loaded.remote()


def num_unready(actors: Mapping[str, Any], timeout_s: float) -> int:
    """Return how many of these are neither ready nor known to have failed within a time."""
    calls = [actor.wait_ready.remote() for actor in actors.values()]
    _, waiting = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    return len(waiting)


def wait_ready(
    actors: Mapping[str, Any],
    deadline: float,
    timeout_s: float,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, str]:
    """Wait for each actor's address and report it; the first failure ends the wait."""
    names = {actor.wait_ready.remote(): name for name, actor in actors.items()}
    addresses: dict[str, str] = {}
    while waiting := [call for call, name in names.items() if name not in addresses]:
        check()
        done, _ = ray.wait(waiting, num_returns=1, timeout=CHECK_PERIOD_S)
        if not done and time.monotonic() < deadline:
            continue
        if not done:
            missing = [told_name(names[call]) for call in waiting]
            raise StartError(_diagnosis(missing, timeout_s))
        name = names[done[0]]
        try:
            addresses[name] = ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise StartError(f"{told_name(name)} did not start: {last_line(error)}") from error
        say(f"{told_name(name)} is ready, {len(addresses)} of {len(names)}")
    return addresses


def wait_until_served(
    address: str,
    tls: Tls | None,
    router: Any,
    workers: Collection[str],
    deadline: float,
    check: Callable[[], None],
) -> int:
    """Wait until a router sees these workers ready; return the longest context that all serve.

    Raises:
        StartError: It does not in time, cannot use a worker, or does not answer.
    """
    status: ClusterStatus | None = None
    token = str(ask(router.cluster_token.remote()))
    with Client(address, token=token, default_timeout_s=ANSWER_TIMEOUT_S, tls=tls) as client:
        while time.monotonic() < deadline:
            check()
            try:
                status = client.status()
            except PagewireError as error:
                raise StartError(f"the router does not answer: {error}") from error
            ready = {each.worker_id for each in status.workers if each.state == "ready"}
            if ready >= set(workers):
                return client.list_models()[0].max_context_tokens
            _refuse_misfits(ask(router.misfits.remote()))
            time.sleep(STATUS_PERIOD_S)
    states = {each.worker_id: each.state for each in status.workers} if status else {}
    missing = [f"{each} is {states.get(each, 'unknown')}" for each in workers]
    raise StartError(f"the router does not see all workers ready: {', '.join(missing)}")


def _refuse_misfits(misfits: Mapping[str, str]) -> None:
    if misfits:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in misfits.items())
        raise StartError(f"workers that cannot serve beside the others: {reasons}")


def _diagnosis(missing: list[str], timeout_s: float) -> str:
    gpus = ""
    if num_gpus := cluster_resources().get("GPU", 0):
        free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        gpus = f" {free.get('GPU', 0):.0f} of {num_gpus:.0f} GPUs are free;"
    return (
        f"{', '.join(missing)} not ready after {timeout_s:.0f} s;{gpus} see the logs of the Ray "
        f"session ({session_logs()} on each host), or raise --start-timeout-s"
    )


def cluster_resources() -> Mapping[str, float]:
    """Return the total resources of the attached Ray."""
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources
