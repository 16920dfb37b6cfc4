"""Ray actor of an HTTP gateway beside a router, whose address it requests.

Ray imports this wherever an actor is placed, so what serves is imported where it serves.
"""

import asyncio
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import Any

import ray

from credentials.config import TlsSettings
from credentials.door import front_door
from http_gateway.config import GatewayConfig
from http_gateway.handover import receive_listener
from observability.actor import has_come_back
from observability.logs import configure_logging
from observability.open_files import raise_file_limit
from observability.serving_process import settle_process
from observability.tracing import TracingConfig, stop_tracing
from options.interfaces import address_on
from options.kept_by_name import kept_by_name
from pagewire import Tls, UnavailableError

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 5.0  # a router that takes longer to start answers later; clients get an error
FIND_PAUSE_S = 0.1


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayStart:
    """What each start of a gateway gets; Ray stores it."""

    config: GatewayConfig
    host: str  # where clients connect; empty: the address of network_interface
    network_interface: str
    port: int
    log_level: str  # see observability.logs
    log_format: str
    # The router's actor. A name, because Ray cannot restart an actor whose arguments hold a handle
    # of a dead actor.
    router_name: str
    tls: TlsSettings  # of its port
    router_tls: Tls | None  # of its connection to the router; None: in clear
    tracing: TracingConfig = field(default_factory=TracingConfig)
    predecessor: str = ""  # the actor whose listener the first start gets; empty: it makes one


class GatewayActor:
    """One gateway; `__init__` returns when it listens. It never touches CUDA."""

    async def __init__(self, start: GatewayStart) -> None:  # type: ignore[misc] # Ray awaits it
        configure_logging(start.log_level, start.log_format)
        raise_file_limit(start.config.max_connections)
        self._router_name = start.router_name
        try:
            from http_gateway.server import GatewayServer, trace_gateway

            trace_gateway(start.tracing)
            self._server = GatewayServer(
                self._find_routers,
                config=start.config,
                host=start.host or address_on(start.network_interface),
                port=start.port,
                door=front_door(start.tls),
                router_tls=start.router_tls,
            )
            takes_over = start.predecessor and not has_come_back()
            listener = await _listener_of(start.predecessor) if takes_over else None
            self._address = await self._server.start(listener)
        except Exception:
            if not has_come_back():
                raise  # the launcher reports it
            # Ray gives up an actor whose constructor raises, but restarts a dead process.
            log.exception("gateway_start_failed")
            os._exit(1)
        settle_process()

    async def wait_ready(self) -> str:
        """Return the address of the HTTP server."""
        return self._address

    async def stop(self, grace_s: float) -> None:
        """Give running answers `grace_s` seconds, then end everything but the actor."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(stop_tracing)

    async def hand_over(self, path: str) -> None:
        """Send the listener to a successor; see receive_listener."""
        self._server.hand_over(path)

    async def retire(self, grace_s: float) -> None:
        """Leave new connections to a successor, give others `grace_s` seconds, then `stop`."""
        await self._server.retire(grace_s)
        await asyncio.to_thread(stop_tracing)

    async def pid(self) -> int:
        """Return the process id on its host."""
        return os.getpid()

    async def _find_routers(self) -> list[str]:
        """Return the router's current address; its port may change at each start."""
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S):
                while True:
                    try:
                        router: Any = ray.get_actor(self._router_name)
                        return [str(await router.wait_ready.remote())]
                    except ray.exceptions.ActorUnavailableError:  # Ray starts it again
                        await asyncio.sleep(FIND_PAUSE_S)
        except TimeoutError:
            told = f"the router has not answered within {FIND_TIMEOUT_S:g} s; it may be starting"
            raise UnavailableError(told, code="UNAVAILABLE") from None
        except (ray.exceptions.RayError, ValueError) as error:
            told = f"the router cannot be found: {type(error).__name__}"
            raise UnavailableError(told, code="UNAVAILABLE") from error


async def _listener_of(name: str) -> socket.socket:
    gateway: Any = ray.get_actor(name)
    return await receive_listener(gateway.hand_over.remote)
