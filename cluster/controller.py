"""The controller: a named Ray actor that hears of each start of a worker and tells the routers.

It holds nothing that the next announcements do not bring again, so its death stops no request and
its restart needs no storage: workers and routers announce themselves every two seconds. While they
load, workers tell it how far they are, and the launcher asks: they themselves answer nobody yet.
"""

import asyncio
import logging
import os
from typing import Any

import ray

from cluster.membership import Membership
from observability.logs import configure_logging, fields
from router.membership import PoolName, WorkerMember

log = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 5.0


class ControllerActor:
    """Hears announcements and pushes the membership to every router that announced itself."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, log_level: str, log_format: str
    ) -> None:
        configure_logging(log_level, log_format)
        self._membership = Membership()
        self._routers: dict[str, Any] = {}  # router_id |-> actor handle
        self._loaded: dict[str, tuple[int, int]] = {}  # worker_id |-> bytes loaded, bytes in all

    async def announce_worker(
        self, worker_id: str, incarnation: int, address: str, pool: PoolName
    ) -> None:
        """Enter one start of a worker; idempotent."""
        member = WorkerMember(
            worker_id=worker_id, incarnation=incarnation, address=address, pool=pool
        )
        if self._membership.announce(member):
            log.info(
                "worker_announced",
                extra=fields(
                    worker_id=worker_id, incarnation=f"{incarnation:016x}", address=address
                ),
            )
            await asyncio.gather(*(self._push(router_id) for router_id in self._routers))

    async def announce_router(self, router_id: str, handle: Any) -> None:
        """Enter a router and tell it the workers; a restarted one knows none, so each time."""
        self._routers[router_id] = handle
        await self._push(router_id)

    async def was_ready(self, name: str) -> bool:
        """Return whether an earlier process of this worker or router has served."""
        return name in self._membership or name in self._routers

    async def report_loaded(self, worker_id: str, done_bytes: int, total_bytes: int) -> None:
        """Note how far a worker's weights are; what loads at once is never reported."""
        self._loaded[worker_id] = done_bytes, total_bytes

    async def loaded(self) -> tuple[int, int]:
        """Return the bytes that are loaded, and all bytes, of the workers that have reported."""
        reports = self._loaded.values()
        return sum(done for done, _ in reports), sum(total for _, total in reports)

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    async def _push(self, router_id: str) -> None:
        call = self._routers[router_id].set_workers.remote(self._membership.members)
        try:
            await asyncio.wait_for(call, PUSH_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            # A router that comes back announces itself and is told then.
            log.warning("push_failed", extra=fields(router_id=router_id, error=str(error)))
