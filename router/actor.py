"""Ray actor of a router.

Ray imports this wherever an actor is placed, so what serves is imported where it serves.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import ray

from credentials.config import TlsSettings
from observability.actor import has_come_back
from observability.last_line import last_line
from observability.logs import configure_logging, fields
from observability.serving_process import stop_in_time
from options.kept_by_name import kept_by_name
from router.errors import ControllerGone
from router.settings import RouterSettings

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 5.0


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStart:
    """What each start of a router gets; Ray stores it."""

    settings: RouterSettings
    # The actor that knows the workers. A name, because Ray cannot restart an actor whose arguments
    # hold a handle of a dead actor.
    controller_name: str


class RouterActor:
    """One router; `__init__` returns when it serves. It never touches CUDA."""

    async def __init__(self, start: RouterStart) -> None:  # type: ignore[misc] # Ray awaits it
        self._settings = settings = start.settings
        configure_logging(settings.log_level, settings.log_format)
        self._controller_name = start.controller_name
        self._ending: asyncio.Task[None] | None = None
        try:
            from router.process import RouterProcess

            self._process = RouterProcess(settings, self._find_controller)
            self._address = await self._process.start()
        except Exception:
            if not has_come_back():
                raise  # the launcher reports it
            # Ray gives up an actor whose constructor raises, but restarts a dead process.
            log.exception("router_start_failed", extra=fields(router_id=settings.config.router_id))
            os._exit(1)

    async def wait_ready(self) -> str:
        """Return the gRPC address."""
        return self._address

    async def cluster_token(self) -> str:
        """Return the token for callers that may use this Ray; empty: none is needed."""
        return self._process.cluster_token

    async def tls_settings(self) -> TlsSettings:
        """Return how clients connect, as paths of files."""
        return self._settings.tls

    async def misfits(self) -> dict[str, str]:
        """Return the misfits among the workers, which get no requests: name |-> reason."""
        return self._process.router.registry.misfits()

    async def ready_workers(self) -> dict[str, int]:
        """Return the workers that get requests: name |-> incarnation."""
        registry = self._process.router.registry
        ready = [*registry.ready("prefill"), *registry.ready("decode")]
        return {each.member.worker_id: each.member.incarnation for each in ready}

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end everything but the actor."""
        await self._process.stop(grace_s)

    async def restart(self, grace_s: float) -> None:
        """Begin to end: running requests get `grace_s`; then Ray restarts the router.

        Returns at once; a second call changes nothing.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._begin_anew(grace_s))

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    async def _begin_anew(self, grace_s: float) -> None:
        await stop_in_time(self._process.stop, grace_s)
        os._exit(1)

    async def _find_controller(self) -> str:
        """Return the controller's current address; its port may change at each start."""
        try:
            call: Any = ray.get_actor(self._controller_name).address.remote()
            return str(await asyncio.wait_for(call, FIND_TIMEOUT_S))
        except TimeoutError as error:
            raise ControllerGone(f"no address from it within {FIND_TIMEOUT_S:g} s") from error
        except (ray.exceptions.RayError, ValueError) as error:
            raise ControllerGone(f"no address from it: {last_line(error)}") from error
