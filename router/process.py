"""The process of a router: its server, and the feed of its workers.

The same in Ray (router/actor.py) and without it (`pagewire router`).
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from grpc_reflection.v1alpha import reflection

from credentials.channel import ProvenChannel
from credentials.cluster import ClusterCredentials
from credentials.door import ClusterLinks, front_door
from credentials.party import CONTROLLER_PARTY_NAME, Party
from credentials.rules import HEALTH_SERVICE
from observability.logs import fields
from observability.metrics_server import MetricsServer, ask_loop
from observability.open_files import raise_file_limit
from observability.serving_process import settle_process
from observability.tracing import configure_tracing, stop_tracing
from options.interfaces import address_on
from protos.addresses import join_address
from protos.contract import CONTRACT_VERSION
from router.errors import PortTaken
from router.front import make_server
from router.health import INFERENCE_SERVICE
from router.member_feed import MemberFeed
from router.membership import WorkerMember
from router.random_ids import random_ids
from router.router import Router
from router.settings import RouterSettings
from router.tenants.file import digest_of, read_tenants
from router.tenants.gate import is_operator
from router.tenants.registry import Tenants
from router.tenants.watch import TenantsWatch

log = logging.getLogger(__name__)

CLOSE_S = 1.0  # for cancelled calls to end


class RouterProcess:
    """Owns the router, its server and its feed. Lives in the event loop that called start.

    Args:
        settings: What to start.
        find_controller: Returns the address of the cluster's controller; raises ControllerGone.

    Raises:
        PemError: A file for TLS cannot be used.
        NoAddress: There is none on the network interface.
        TenantsFileError: The tenants file cannot be used.
    """

    def __init__(
        self, settings: RouterSettings, find_controller: Callable[[], Awaitable[str]]
    ) -> None:
        keys = settings.keys
        self._settings = settings
        self._host = settings.host or address_on(settings.network_interface)
        self._tenants, self._watch = _tenants_of(settings)
        config = replace(
            settings.config,
            page_hash_key=keys.page_hashes,
            resume_key=keys.resume_tokens,
            # The version of this code: Ray may have stored the settings of older code.
            contract_version=CONTRACT_VERSION,
        )
        credentials = ClusterCredentials(keys.party, secrets.randbits(63) + 1)
        links = ClusterLinks(settings.tls)
        self._front = front_door(settings.tls)
        self.router = Router(
            config=config,
            model_dir=settings.model_dir,
            connect_channel=partial(connect_worker, credentials, links),
            random_id=random_ids(),
            describe_tls=lambda: (self._front.encryption(), links.door.encryption()),
            controller_silence=lambda: self._feed.silence,
            tenants=self._tenants,
        )
        self._server = make_server(config, self._tenants, shares_port=settings.shares_port)
        self._feed = MemberFeed(
            router_id=config.router_id,
            find_controller=find_controller,
            connect_controller=partial(connect_controller, credentials, links),
            take=self.router.set_workers,
        )
        self._metrics: MetricsServer | None = None
        self._followers: list[asyncio.Task[None]] = []  # of members, and of the tenants file

    @property
    def cluster_token(self) -> str:
        """The token of the cluster's owner; empty: calls need none."""
        return "" if self._tenants.is_open else self._settings.keys.cluster_token

    async def start(self) -> str:
        """Serve, and find the workers; returns the address as soon as clients can connect.

        Raises:
            ModelFolderError: The chat template cannot be used.
            RuntimeError: The port is taken.
            NoPortFree: All ports of the range are taken.
            OpenInClear: Other hosts could connect without encryption.
            PortTaken: The port of the metrics is in use.
            TracingUnavailable: Traces are configured, and OpenTelemetry is not installed.
        """
        settings = self._settings
        raise_file_limit(settings.config.max_connections)
        configure_tracing(
            settings.tracing, service="pagewire-router", instance=settings.config.router_id
        )
        if settings.config.metrics_port:
            self._serve_metrics(settings.config.metrics_port)
        port = settings.ports.listen(
            self._host,
            lambda port: self._front.add_port(self._server, self._host, port),
            settings.port,
        )
        address = join_address(self._host, port)
        self.router.register(self._server)
        names = [INFERENCE_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        await self.router.start()
        await self._server.start()
        self._followers = [asyncio.create_task(self._feed.run(), name="member-feed")]
        if self._watch is not None:
            watching = asyncio.create_task(self._watch.run(), name="tenants-watch")
            self._followers.append(watching)
        settle_process()
        log.info(
            "router_listens", extra=fields(router_id=settings.config.router_id, address=address)
        )
        return address

    async def wait_ready(self, waits: Callable[[str], None]) -> None:
        """Wait until a decode worker takes requests; the caller bounds the wait.

        Args:
            waits: Called with what is missing, if it is for long: the controller, then a worker.
        """
        await self._feed.wait_followed(waits)
        await self.router.health.wait_ready(waits)

    async def stop(self, grace_s: float) -> None:
        """Refuse new work, give running requests `grace_s` seconds, then end everything.

        Clients resume unfinished requests elsewhere. Meanwhile the router reports that it stops; if
        it shares its port, it closes it, so that other routers get all new connections.
        """
        closing = []
        if self._settings.shares_port:
            closing.append(asyncio.create_task(self._server.stop(grace_s + CLOSE_S)))
        await self.router.stop(grace_s)
        for each in self._followers:
            each.cancel()
        if self._followers:
            await asyncio.wait(self._followers, timeout=CLOSE_S)
        await self._server.stop(None)
        await asyncio.gather(*closing)
        if self._metrics:
            await asyncio.to_thread(self._metrics.close)
        await asyncio.to_thread(stop_tracing)

    def _serve_metrics(self, port: int) -> None:
        on_loop = partial(ask_loop, asyncio.get_running_loop())
        router, host = self.router, self._host
        router.metrics.tell_cluster(
            lambda: on_loop(router.cluster_status), lambda: router.model_name
        )
        tls = self._front.ssl_context(host)
        try:
            self._metrics = MetricsServer(
                router.metrics.registry,
                host,
                port,
                tls=tls,
                is_operator=lambda given: on_loop(lambda: is_operator(self._tenants, given)),
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise PortTaken(
                f"router.metrics_port: found {port}, on which nothing can listen at {host}: "
                f"{reason}; allowed: a free port, or 0 for no metrics"
            ) from error
        log.info("metrics_ready", extra=fields(address=join_address(host, self._metrics.port)))


def _tenants_of(settings: RouterSettings) -> tuple[Tenants, TenantsWatch | None]:
    if not settings.config.tenants_file:
        return Tenants(), None
    path = Path(settings.config.tenants_file)
    read = read_tenants(path)
    own = digest_of(settings.keys.cluster_token.encode())
    tenants = Tenants(read.rules, cluster_digest=own, now=asyncio.get_running_loop().time())
    return tenants, TenantsWatch(path, tenants, read)


def connect_worker(
    credentials: ClusterCredentials, links: ClusterLinks, member: WorkerMember
) -> ProvenChannel:
    """Open a channel to one start of a worker."""
    callee = Party(role=member.pool, name=member.worker_id, incarnation=member.incarnation)
    return ProvenChannel(links.connect(member.address), credentials.callee(callee))


def connect_controller(
    credentials: ClusterCredentials, links: ClusterLinks, address: str, incarnation: int
) -> ProvenChannel:
    """Open a channel to one start of a controller."""
    callee = Party(role="controller", name=CONTROLLER_PARTY_NAME, incarnation=incarnation)
    return ProvenChannel(links.connect(address), credentials.callee(callee))
