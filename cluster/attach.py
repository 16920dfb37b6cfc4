"""Attaches this process to a Ray, and calls the cluster that runs there."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from cluster.disk_room import check_room
from cluster.errors import ClusterError, NotRunning, StartError
from cluster.local_head import LocalHead, find_head, how_head_ended
from cluster.placement import CONTROLLER_NAME, ROUTER_NAME
from cluster.private_folder import TOKEN_PATH_VARIABLE
from cluster.ray_actors import NAMESPACE
from cluster.ray_address import check_ray_answers
from cluster.ray_driver import unobtrusive_driver
from cluster.served import served_clusters
from observability.last_line import last_line
from observability.logs import fields

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0  # for answers of a controller from memory, or from Ray
START_TIMEOUT_S = 120.0  # for a controller's process, too; hosts can be busy with other starts
AT_ONCE_S = 1.0  # in which serving processes answer
USUAL_START_S = 10.0  # of a controller; a longer wait is told


def attach_ray(address: str, *, shows_worker_logs: bool) -> None:
    """Attach to the Ray at host:port or "auto".

    Raises:
        StartError: It does not answer, or refuses this user.
    """
    check_ray_answers(address)
    try:
        with unobtrusive_driver():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=shows_worker_logs,
                logging_level=logging.WARNING,
            )
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise StartError(f"cannot attach to Ray at {address}: {error}") from error
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        # Anybody who reaches such a Ray can run code in it and read the keys of actors.
        log.warning("ray_takes_anybody", extra=fields(address=address))


def attach_head(head: LocalHead) -> None:
    """Attach to the Ray that `pagewire up` has started on this host; StartError: it is gone."""
    os.environ[TOKEN_PATH_VARIABLE] = head.token_path
    os.environ.pop("RAY_AUTH_TOKEN", None)  # another cluster's; Ray would prefer it
    attach_ray(head.ray_address, shows_worker_logs=False)


@contextmanager
def attached(address: str) -> Iterator[Any]:
    """Attach while entered, and yield the handle of the cluster's controller.

    Args:
        address: The address of a Ray cluster; empty: that of `pagewire up` on this host.

    Raises:
        NotRunning: There is no cluster.
        StartError: The Ray does not answer.
    """
    if address:
        attach_ray(address, shows_worker_logs=False)
    elif head := find_head():
        attach_head(head)
    else:
        raise NotRunning(_none_of_up())
    try:
        controller = find_controller()
        if controller is None:
            where = f"the Ray at {address}" if address else "this host"
            raise NotRunning(f"no cluster runs on {where}")
        yield controller
    finally:
        ray.shutdown()


def check_log_room() -> None:
    """Refuse to start processes while the disk is full to which the attached Ray logs here.

    Raises:
        StartError: It is; names the folder.
    """
    node = ray._private.worker._global_node
    assert node is not None, "this process has attached to a Ray"
    check_room(Path(node.get_logs_dir_path()))


def find_controller() -> Any:
    """Return the handle of the controller on the attached Ray; None: no cluster runs there."""
    with suppress(ValueError):
        return ray.get_actor(CONTROLLER_NAME)
    return None


def _none_of_up() -> str:
    """Return the error text for a host on which `pagewire up` runs no cluster."""
    told = "no cluster that `pagewire up` started runs on this host"
    if served := " and ".join(each.address for each in served_clusters()):
        told += (
            f"; `pagewire serve` runs one at {served}, which keeps its workers and ends with "
            "Ctrl-C: start one that can be changed with `pagewire up`"
        )
    elif ended := how_head_ended():
        told += f"; the Ray of the last one: {ended}"
    else:
        told += "; give --ray-address for one on a Ray that it did not start"
    return told


def router_address() -> str:
    """Return the address of the cluster's router on the attached Ray, once it listens."""
    with suppress(ValueError):
        return str(ask(ray.get_actor(ROUTER_NAME).wait_ready.remote()))
    raise StartError("the cluster has no router yet; run `pagewire up` again to place one")


def router_token() -> str:
    """Return the token for calls to that router; empty: none is needed, or there is none."""
    with suppress(ValueError):
        return str(ask(ray.get_actor(ROUTER_NAME).cluster_token.remote()))
    return ""


def router_calls() -> dict[str, Any]:
    """Ask the cluster's router how to call it.

    Returns:
        Names of its methods |-> calls; empty: the cluster has no router.
    """
    try:
        router = ray.get_actor(ROUTER_NAME)
    except ValueError:
        return {}
    methods = ("wait_ready", "cluster_token", "tls_settings")  # older code lacks the last one
    return {each: getattr(router, each).remote() for each in methods if hasattr(router, each)}


def look(call: Any, began_at: float, limit_s: float) -> tuple[Any, str]:
    """Return the answer to a call that changes nothing, or else None and why there is none.

    Args:
        call: To an actor.
        began_at: When the wait for it began, by the monotonic clock.
        limit_s: The longest wait.
    """
    try:
        return ray.get(call, timeout=max(began_at + limit_s - time.monotonic(), 0.0)), ""
    except ray.exceptions.GetTimeoutError:
        return None, f"no answer within {limit_s:g} s"
    except ray.exceptions.RayError as error:
        return None, last_line(error)


def named_actors() -> dict[str, Any]:
    """Return the handles of all processes of the cluster on the attached Ray, by name."""
    names: list[str] = ray.util.list_named_actors()
    actors = {}
    for name in names:
        with suppress(ValueError):  # it has just ended
            actors[name] = ray.get_actor(name)
    return actors


def ask(call: Any, timeout_s: float = ASK_TIMEOUT_S) -> Any:
    """Return the answer of the controller or the router.

    Raises:
        ClusterError: As raised there, or because there is no answer.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise
    except ray.exceptions.GetTimeoutError as error:
        raise StartError(
            f"the cluster did not answer within {timeout_s:g} s; what it was asked for may have "
            "begun: look with `pagewire status` before you try again"
        ) from error
    except ray.exceptions.RayError as error:
        raise StartError(
            f"the cluster does not answer ({last_line(error)}); Ray starts it again "
            "by itself: try again in some seconds"
        ) from error


def ask_starting(call: Any, say: Callable[[str], None], check: Callable[[], None]) -> Any:
    """Return the answer of a controller that may still have to start.

    Args:
        call: To it.
        say: Told what the wait is for, if it is a long one.
        check: Called repeatedly; its errors end the wait.

    Raises:
        ClusterError: As raised there, or because there is no answer.
    """
    began = time.monotonic()
    is_told = False
    while not ray.wait([call], timeout=AT_ONCE_S)[0]:
        check()
        waited_s = time.monotonic() - began
        if waited_s >= START_TIMEOUT_S:
            raise StartError(
                f"the cluster's controller has not answered within {START_TIMEOUT_S:.0f} s; its "
                "host may be busy: try again, or end it with `pagewire down --grace-s 0`; see the "
                "logs of the Ray session"
            )
        if waited_s >= USUAL_START_S and not is_told:
            say("waiting for the cluster's controller, which Ray starts")
            is_told = True
    return ask(call)
