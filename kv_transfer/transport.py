"""The seam between the transfer protocol and its carriers: cuda_ipc, nccl, tcp.

A connection carries pages in one direction between one sender and one receiver. Operations of one
side end one after the other, in the order of their calls. The protocol guarantees the same order on
both sides, and that both know of each other's operation before the receiver posts.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal, Protocol

from kv_cache.page_storage import PageStorage
from kv_transfer.errors import TransportRefused
from kv_transfer.page_socket import PageTls
from kv_transfer.proven_sockets import ProvenSockets
from observability.logs import fields
from options.ports import ANY_PORT, FreePorts

logger = logging.getLogger(__name__)

PageTransport = Literal["auto", "nccl"]  # how pages move between GPUs of one host


class Connection(Protocol):
    """One direction between one prefill and one decode worker."""

    @property
    def connection_id(self) -> str: ...

    @property
    def is_broken(self) -> bool:
        """True once an operation failed or abort was called; the connection is never used again."""
        ...

    @property
    def max_chunk_bytes(self) -> int:
        """Most bytes to move at a time, or one page: other transfers wait for them."""
        ...

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        """Send pages of the local storage, in order; returns when they may be reused.

        Args:
            seconds: How long it may take, from the end of the send before it.

        Raises:
            ConnectionBroken: On any failure, or when it takes longer. The caller must then call
                abort before it reuses the pages.
        """
        ...

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        """Receive as many pages into the local storage, in order; raises as send does."""
        ...

    async def abort(self) -> None:
        """Stop all posted operations. When it returns, no page is written any more."""
        ...


class Transport(Protocol):
    """Makes connections for one worker's storage.

    A connection has a key of 32 bytes that only its two sides can derive. A transport that accepts
    connections from the network admits only peers that prove their knowledge of the key.
    """

    @property
    def name(self) -> str: ...

    def offer(self, connection_id: str, key: bytes) -> bytes:
        """Receiver: begin a connection; returns the offer, by which the sender finds it."""
        ...

    async def accept(self, connection_id: str, deadline: float) -> Connection:
        """Receiver: complete the connection begun by offer, while the sender runs connect.

        Raises:
            ConnectionBroken: When the sender does not come before `deadline`.
        """
        ...

    async def connect(
        self, connection_id: str, offer: bytes, key: bytes, deadline: float
    ) -> Connection:
        """Sender: complete the connection that the receiver offered; raises as accept does."""
        ...

    async def close(self) -> None:
        """Abort all connections."""
        ...


def open_transports(
    storage: PageStorage,
    device: str,
    host: str,
    tls: PageTls | None = None,
    ports: FreePorts = ANY_PORT,
    choice: PageTransport = "auto",
) -> list[Transport]:
    """Return the transports for a worker's pages, best first.

    NCCL is always there: for GPUs of different hosts, and for workers of one that share no memory.

    Args:
        storage: The storage of the pages.
        device: Its device.
        host: The worker's own address.
        tls: Encrypts connections, but not those of NCCL; None: they are in clear.
        ports: From which listeners take theirs, except those of NCCL.
        choice: "auto": within one host the receiver reads the sender's memory; "nccl": never.
    """
    sockets = ProvenSockets(host=host, tls=tls, ports=ports)
    if device == "cuda":
        from kv_transfer.cuda_ipc import CudaIpcTransport
        from kv_transfer.nccl import NcclTransport

        transports: list[Transport] = []
        if choice != "nccl":
            try:
                transports.append(CudaIpcTransport(storage, sockets))
            except TransportRefused as error:
                logger.warning("transport_missing", extra=fields(reason=str(error)))
        return [*transports, NcclTransport(storage)]
    from kv_transfer.tcp import TcpTransport

    return [TcpTransport(storage, sockets)]


async def close_transports(transports: Sequence[Transport], timeout_s: float) -> None:
    """Close transports, at the end of a worker; those that take longer are left to the process."""
    closing = [asyncio.create_task(each.close()) for each in transports]
    closed, late = await asyncio.wait(closing, timeout=timeout_s) if closing else (set(), set())
    for task in late:
        task.cancel()
    for task in closed:
        task.result()
