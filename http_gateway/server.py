"""The gateway as a server: a listening socket, uvicorn around the application, an orderly end."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn

from credentials.config import TlsSettings
from credentials.door import Door, front_door, is_loopback_host
from http_gateway.accept_errors import AcceptErrors
from http_gateway.app import build_app
from http_gateway.config import GatewayConfig
from http_gateway.connection import Connection
from http_gateway.found_routers import FindRouters
from http_gateway.handover import send_listener
from http_gateway.places import Places
from http_gateway.wire import RouterLink
from observability.logs import fields
from observability.rare_line import RareLine
from observability.tracing import TracingConfig, configure_tracing
from pagewire import PagewireError, Tls
from pagewire.routers import Connector
from protos.addresses import join_address

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTS = 16  # connections that one turn of the event loop takes
TELL_S = 1.5  # to tell clients that their grace is over; longer than LINGER_S


def trace_gateway(config: TracingConfig) -> None:
    """Send the spans of this process to the collector; call it once, before any request.

    Raises:
        TracingUnavailable: OpenTelemetry is not installed.
    """
    name = f"gateway-{socket.gethostname()}-{os.getpid()}"
    configure_tracing(config, service="pagewire-gateway", instance=name)


class GatewayServer:
    """Serves HTTP for the routers of a cluster, in the event loop that starts it.

    Args:
        find_routers: Returns their addresses; called again when one is lost.
        config: Limits.
        host, port: Where clients connect; port 0 takes a free one.
        door: TLS of its port; None: in clear, for this host.
        router_tls: TLS of the connections to routers; None: in clear.
        needs_tenants: See RouterLink.
    """

    def __init__(
        self,
        find_routers: FindRouters,
        *,
        config: GatewayConfig,
        host: str,
        port: int,
        door: Door | None = None,
        router_tls: Tls | None = None,
        needs_tenants: bool = False,
    ) -> None:
        self._find_routers = find_routers
        self._door = door or front_door(TlsSettings())
        self._router_tls = router_tls
        self._needs_tenants = needs_tenants
        self._config = config
        self._host = host
        self._port = port
        self._is_retiring = asyncio.Event()
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._link: RouterLink | None = None

    async def start(self, listener: socket.socket | None = None) -> str:
        """Listen; return the address, host:port.

        Args:
            listener: A socket that listens there already, as a predecessor's does.

        Raises:
            OSError: The address cannot be bound.
            OpenInClear: Other hosts could connect without encryption.
            InvalidRequestError: A file of router_tls cannot be used.
        """
        context = self._door.ssl_context(self._host)
        self._listener = listener = listener or _listen(self._host, self._port)
        self._link = RouterLink(
            self._find_routers,
            request_timeout_s=self._config.request_timeout_s,
            resume_s=self._config.resume_s,
            tick_s=self._config.comment_period_s,
            connector=Connector(self._router_tls),
            needs_tenants=self._needs_tenants,
        )
        places = Places(self._config.max_connections)
        refusals = RareLine(log, logging.INFO, "connection_refused")
        settings: dict[str, Any] = {
            "app": build_app(self._link, self._config, is_local=is_loopback_host(self._host)),
            "http": partial(Connection, self._config, places, refusals, self._is_retiring),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "critical",  # events are logged here, with fields
            "access_log": False,  # the application writes its own
            "proxy_headers": False,
            "server_header": False,
            "timeout_keep_alive": self._config.idle_timeout_s,
        }
        self._server = _Server(uvicorn.Config(**settings), context, self._config)
        serving = self._server.serve(sockets=[listener])
        self._serving = asyncio.create_task(serving, name="http-gateway")
        address = join_address(self._host, listener.getsockname()[1])
        log.info("gateway_listens", extra=fields(address=address))
        return address

    async def wait_ready(self, waits: Callable[[PagewireError], None]) -> None:
        """Wait until a request would find a worker; see RouterLink. Needs `start`."""
        assert self._link is not None
        await self._link.wait_ready(waits)

    def hand_over(self, path: str) -> None:
        """Send a copy of the listener to a successor; see handover. Needs `start`."""
        assert self._listener
        send_listener(self._listener, path)

    async def retire(self, grace_s: float) -> None:
        """Leave new connections to a successor that listens, give others `grace_s` seconds, stop.

        A connection's next answer tells its client that it closes. Without a next request it closes
        as an idle one always does, because a client may be sending one; at the latest it closes at
        the end of the grace.
        """
        if not self._server:
            return
        await self._server.close_listener()
        self._is_retiring.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                # What was accepted last is unknown while it begins TLS.
                await asyncio.sleep(self._config.head_timeout_s)
                await self._server.wait_without_connections()
        await self.stop(0.0)

    async def stop(self, grace_s: float) -> None:
        """Accept no more requests, give running answers `grace_s` seconds, then end them.

        Clients whose answers end early are told so, which takes up to twice TELL_S more.
        """
        if not (self._server and self._serving and self._link):
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving
        await self._link.aclose()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: its owner stops it.

    Args:
        config: uvicorn's.
        context: The TLS context; None: connections are in clear.
        limits: The gateway's; uvicorn leaves a client a minute to begin TLS, asyncio half a minute
            to end it, and so to read the rest of its answer.
    """

    def __init__(
        self, config: uvicorn.Config, context: ssl.SSLContext | None, limits: GatewayConfig
    ) -> None:
        super().__init__(config)
        self._tls: dict[str, Any] = {}
        if context is not None:
            self._tls = {
                "ssl": context,
                "ssl_handshake_timeout": limits.head_timeout_s,
                "ssl_shutdown_timeout": limits.slow_client_timeout_s,
            }

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets."""
        await self.lifespan.startup()

        protocol: Any = self.config.http_protocol_class
        connection = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptErrors())
        self.servers = []
        for each in sockets or ():
            # asyncio takes its backlog for both: how many wait, and how many it takes at once.
            server = await loop.create_server(connection, sock=each, backlog=ACCEPTS, **self._tls)
            self.servers.append(server)
            each.listen(BACKLOG)
        self.started = True

    async def close_listener(self) -> None:
        """Accept no more connections, and keep those that are accepted."""
        loop = asyncio.get_running_loop()
        for listener in (each for server in self.servers for each in server.sockets):
            loop.remove_reader(listener)
        # Once closed, asyncio's server would drop those that it has accepted in this turn.
        await asyncio.sleep(0)
        for each in self.servers:
            each.close()

    async def wait_without_connections(self) -> None:
        """Wait until all connections have ended."""
        await self._wait_tasks_to_complete()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end within the grace, then have the others say why they do not."""
        await super().shutdown(sockets)  # its last act is to cancel them; none has run since
        for each in self._connections():
            each.end_after_answer()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_tasks_to_complete(), TELL_S)
        for each in self._connections():
            each.abort()  # its client does not read
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=TELL_S)

    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
