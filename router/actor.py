"""Ray actor of a router: serves clients on a fixed port, hears of workers from the controller."""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from credentials.channel import ProvenChannel
from credentials.cluster import ClusterCredentials
from credentials.party import Party
from credentials.secret import PartyKeys
from observability.collector import settle_collector
from observability.logs import configure_logging, fields
from protos.addresses import join_address
from protos.grpc_options import WORKER_CHANNEL_OPTIONS
from router.config import RouterConfig
from router.front import make_server
from router.membership import WorkerMember
from router.router import Router

log = logging.getLogger(__name__)

ANNOUNCE_PERIOD_S = 2.0  # bounds how long a restarted controller does not know this router
ANNOUNCE_TIMEOUT_S = 5.0
SERVICE = "pagewire.v1.InferenceService"


def connect_worker(credentials: ClusterCredentials, member: WorkerMember) -> ProvenChannel:
    """Open a channel to one start of a worker."""
    callee = Party(role=member.pool, name=member.worker_id, incarnation=member.incarnation)
    channel = grpc.aio.insecure_channel(member.address, options=WORKER_CHANNEL_OPTIONS)
    return ProvenChannel(channel, credentials.callee(callee))


class RouterActor:
    """One router; `__init__` returns when it serves. It never touches CUDA.

    Args:
        config: Limits and policy weights.
        model_dir: Folder of tokenizer and chat template.
        host, port: Where clients connect; port 0 takes a free one, anew at each start.
        log_level, log_format: See observability.logs.
        keys: With which it proves who it is.
        controller_name: Of the actor that calls set_workers. A name, because Ray cannot start an
            actor again whose arguments hold a handle that is gone.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self,
        config: RouterConfig,
        model_dir: Path,
        host: str,
        port: int,
        log_level: str,
        log_format: str,
        keys: PartyKeys,
        controller_name: str,
    ) -> None:
        configure_logging(log_level, log_format)
        self._router_id = config.router_id
        self._controller = ray.get_actor(controller_name)
        is_restart = await self._was_ready()
        try:
            credentials = ClusterCredentials(keys, secrets.randbits(63) + 1)
            self._router = Router(
                config=config,
                model_dir=model_dir,
                connect_channel=partial(connect_worker, credentials),
                random_id=lambda: secrets.token_hex(16),
            )
            self._server = make_server(config)
            port = self._server.add_insecure_port(join_address(host, port))
            self._address = join_address(host, port)
            self._router.register(self._server)
            health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            names = [SERVICE, health, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
            await self._router.start()
            await self._server.start()
        except Exception:
            if not is_restart:
                raise  # the launcher reports it
            # Ray gives up an actor whose constructor raises, but starts a dead process again.
            log.exception("router_start_failed", extra=fields(router_id=self._router_id))
            os._exit(1)
        settle_collector()
        self._announcing = asyncio.create_task(self._announce_for_ever())
        log.info("router_ready", extra=fields(router_id=self._router_id, address=self._address))

    async def wait_ready(self) -> str:
        """Return the gRPC address."""
        return self._address

    async def set_workers(self, workers: Sequence[WorkerMember]) -> None:
        """Take the membership from the controller."""
        await self._router.set_workers(workers)

    async def misfits(self) -> dict[str, str]:
        """Return the workers that serve another model than the others, and in what it differs."""
        return self._router.registry.misfits()

    async def stop(self, grace_s: float) -> None:
        """Give running requests `grace_s` seconds, then end everything but the actor."""
        self._announcing.cancel()
        await self._router.stop(grace_s)
        await self._server.stop(None)

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    async def _was_ready(self) -> bool:
        call: Any = self._controller.was_ready.remote(self._router_id)
        try:
            return bool(await asyncio.wait_for(call, ANNOUNCE_TIMEOUT_S))
        except (ray.exceptions.RayError, TimeoutError):
            return True  # at the first start of a cluster the controller is there

    async def _announce_for_ever(self) -> None:
        handle = ray.get_runtime_context().current_actor
        while True:
            call: Any = self._controller.announce_router.remote(self._router_id, handle)
            try:
                await asyncio.wait_for(call, ANNOUNCE_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                # The controller restarts and hears the next announcement.
                log.warning(
                    "announce_failed", extra=fields(router_id=self._router_id, error=str(error))
                )
            await asyncio.sleep(ANNOUNCE_PERIOD_S)
