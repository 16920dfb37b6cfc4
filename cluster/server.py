"""The controller's gRPC service: tells routers the members, wherever the routers run."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import grpc

from credentials.cluster import ClusterCredentials
from credentials.door import Door
from credentials.gate import ServerGate
from credentials.rules import CONTROLLER_CALLERS
from credentials.secret import PartyKeys
from observability.logs import fields
from options.ports import ANY_PORT, FreePorts
from pagewire.protos import common_pb2, controller_pb2, controller_pb2_grpc
from pagewire.protos.call_tasks import mark_seen
from pagewire.protos.grpc_options import WORKER_SERVER_OPTIONS
from protos.addresses import join_address
from protos.peer_limits import peer_guard
from protos.rpc_server import rpc_server
from router.membership import WorkerMember, WorkerRole

log = logging.getLogger(__name__)

REPEAT_S = 1.0  # as protos/controller.proto says it
MAX_WATCHES = 4096  # of routers, each has one
_POOLS: dict[WorkerRole, common_pb2.Pool] = {
    "prefill": common_pb2.POOL_PREFILL,
    "decode": common_pb2.POOL_DECODE,
}


class MemberServer(controller_pb2_grpc.ControllerServiceServicer):
    """Serves one start of a controller. Lives in the event loop that calls start.

    Args:
        keys: Prove the controller's identity.
        host, port: Where routers connect; port 0 takes one of `ports`.
        door: TLS of its port.
    """

    def __init__(
        self,
        keys: PartyKeys,
        host: str,
        port: int,
        door: Door,
        *,
        ports: FreePorts = ANY_PORT,
    ) -> None:
        self._keys = keys
        self._host = host
        self._port = port
        self._ports = ports
        self._door = door
        self._server: grpc.aio.Server | None = None
        self._message = controller_pb2.WatchMembersResponse(version=1)
        self._published = asyncio.Event()
        self._applied = asyncio.Event()  # by a router that watches, or it has gone
        self._watches: set[_Watch] = set()

    async def start(self) -> str:
        """Serve; return the address.

        Raises:
            RuntimeError: The port is taken.
            OpenInClear: Other hosts could connect without encryption.
        """
        credentials = ClusterCredentials(self._keys, secrets.randbits(63) + 1)
        server = rpc_server(
            interceptors=[
                ServerGate(credentials, CONTROLLER_CALLERS),
                peer_guard(MAX_WATCHES),
            ],
            options=WORKER_SERVER_OPTIONS,
        )
        port = self._ports.listen(
            self._host,
            lambda port: self._door.add_port(server, self._host, port),
            self._port,
        )
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        await server.start()
        self._server = server
        return join_address(self._host, port)

    async def stop(self) -> None:
        """End all calls."""
        if self._server:
            await self._server.stop(None)

    def publish(self, members: Iterable[WorkerMember]) -> None:
        """Publish the members to all routers, including later ones."""
        version = self._message.version
        message = controller_pb2.WatchMembersResponse(
            version=version, members=map(_member, members)
        )
        if message == self._message:
            return
        message.version = version + 1
        self._message = message
        self._published.set()
        self._published = asyncio.Event()

    async def wait_applied(self, timeout_s: float) -> None:
        """Wait until all watching routers apply the last publication, or time is up."""
        version = self._message.version
        try:
            async with asyncio.timeout(timeout_s):
                while any(each.applied < version for each in self._watches):
                    await self._applied.wait()
        except TimeoutError:
            late = [each.router_id or "" for each in self._watches if each.applied < version]
            log.warning("routers_late", extra=fields(router_ids=", ".join(sorted(late))))

    async def WatchMembers(
        self,
        requests: AsyncIterator[controller_pb2.WatchMembersRequest],
        context: grpc.aio.ServicerContext,
    ) -> None:
        watch = _Watch()
        self._watches.add(watch)
        reader = asyncio.create_task(self._read(requests, watch), name="watch-members")
        reader.add_done_callback(mark_seen)
        try:
            while not reader.done():
                published = self._published
                await context.write(self._message)
                with suppress(TimeoutError):
                    await asyncio.wait_for(published.wait(), REPEAT_S)
        finally:
            reader.cancel()
            self._watches.discard(watch)
            self._note_applied()

    async def _read(
        self, requests: AsyncIterator[controller_pb2.WatchMembersRequest], watch: "_Watch"
    ) -> None:
        async for request in requests:
            if watch.router_id is None:
                log.info(
                    "router_watches",
                    extra=fields(
                        router_id=request.router_id, contract_version=request.contract_version
                    ),
                )
            watch.router_id, watch.applied = request.router_id, request.applied_version
            self._note_applied()

    def _note_applied(self) -> None:
        self._applied.set()
        self._applied = asyncio.Event()


class _Watch:
    """One watching router."""

    def __init__(self) -> None:
        self.router_id: str | None = None  # until its first message
        self.applied = 0  # version


def _member(member: WorkerMember) -> controller_pb2.Member:
    return controller_pb2.Member(
        worker=common_pb2.WorkerRef(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            address=member.address,
            contract_version=member.contract_version,
        ),
        pool=_POOLS[member.pool],
        draining=member.is_draining,
    )
