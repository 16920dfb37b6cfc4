"""Replaces the HTTP gateway: a successor takes over the listener, then its predecessor ends."""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from cluster.deployment import Deployment
from cluster.errors import StartError
from cluster.placement import GATEWAY_NAME, gateways, place_gateway, successor_of
from observability.last_line import last_line
from observability.logs import fields
from observability.serving_process import CLOSE_TIMEOUT_S

log = logging.getLogger(__name__)

SERVES_S = 2.0  # for a gateway that serves to say so


class GatewaySuccession:
    """The succession of a cluster's gateways; owned by the controller's event loop.

    Args:
        deployment: The settings of all processes.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._running = asyncio.Lock()  # held while a gateway takes over from another
        self._retiring: dict[str, asyncio.Task[None]] = {}  # gateway |-> what ends it

    async def succeed(self, grace_s: float) -> None:
        """Place a gateway that takes over from the present one, which then ends.

        Args:
            grace_s: Seconds for what runs at the one that ends.

        Raises:
            StartError: The present one is unchanged.
        """
        if self._running.locked():
            raise StartError(
                f"{GATEWAY_NAME} is being restarted by another command; nothing has changed; try "
                "again when that has ended"
            )
        async with self._running:
            present = gateways(ray.util.list_named_actors())
            if not present:
                raise StartError(f"{GATEWAY_NAME} has ended meanwhile; see `pagewire status`")
            name = successor_of(present[-1])
            successor = place_gateway(self._deployment, name, predecessor=present[-1])
            timeout_s = self._deployment.config.start_timeout_s
            try:
                await asyncio.wait_for(successor.wait_ready.remote(), timeout_s)
            except (ray.exceptions.RayError, TimeoutError) as error:
                ray.kill(successor, no_restart=True)
                is_late = isinstance(error, TimeoutError)
                why = f"not ready after {timeout_s:g} s" if is_late else last_line(error)
                raise StartError(
                    f"another {GATEWAY_NAME} did not start: {why}; the running one is unchanged"
                ) from error
        log.info("gateway_succeeded", extra=fields(name=name, grace_s=grace_s))
        self._retire(present, grace_s)

    async def retire_left_over(self, existing: Iterable[str]) -> None:
        """Have gateways end that a controller, since dead, has replaced.

        If such a one crashed, Ray would start it again and again: the port is its successor's.

        Args:
            existing: The names of the actors that Ray has.
        """
        *old, present = gateways(existing) or [""]
        if self._running.locked() or not set(old) - self._retiring.keys():
            return
        with suppress(ray.exceptions.RayError, TimeoutError):  # the next look may find it serving
            serving: Any = ray.get_actor(present).wait_ready.remote()
            await asyncio.wait_for(serving, SERVES_S)
            self._retire(old, self._deployment.config.stop_grace_s)

    def _retire(self, names: Iterable[str], grace_s: float) -> None:
        """Have gateways end; those that retire already keep the grace that they have."""
        for each in names:
            if each not in self._retiring:
                self._retiring[each] = task = asyncio.create_task(_end_gateway(each, grace_s))
                task.add_done_callback(partial(self._retiring.pop, each))


async def _end_gateway(gateway: str, grace_s: float) -> None:
    """Have a gateway end; if its process dies before that, Ray starts no other one."""
    try:
        actor: Any = ray.get_actor(gateway)
    except ValueError:  # it has ended
        return
    try:
        await asyncio.wait_for(actor.retire.remote(grace_s), grace_s + CLOSE_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as error:
        log.warning("retire_failed", extra=fields(name=gateway, error=last_line(error)))
    ray.kill(actor, no_restart=True)
