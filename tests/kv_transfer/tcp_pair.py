"""A sender and a receiver over real sockets, and who listens between them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from credentials.config import TlsSettings
from credentials.door import ClusterLinks
from kv_transfer.page_socket import PageTls
from kv_transfer.proven_sockets import ProvenSockets
from kv_transfer.tcp import TcpConnection, TcpTransport
from tests.kv_transfer.pair import KEY, make_storage
from tests.support.certificates import Authority


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class Pair:
    """A sender and a receiver; each encrypts with what it is given."""

    def __init__(
        self, host: str, sender_tls: PageTls | None = None, receiver_tls: PageTls | None = None
    ) -> None:
        self.source, self.target = make_storage(64, 1), make_storage(64, 2)
        self.sender = TcpTransport(self.source, ProvenSockets(host=host, tls=sender_tls))
        self.receiver = TcpTransport(self.target, ProvenSockets(host=host, tls=receiver_tls))

    async def connect(self, connection_id: str = "c0") -> tuple[TcpConnection, TcpConnection]:
        offer = self.receiver.offer(connection_id, KEY)
        receiving, sending = await asyncio.gather(
            self.receiver.accept(connection_id, soon()),
            self.sender.connect(connection_id, offer, KEY, soon()),
        )
        return receiving, sending


@asynccontextmanager
async def a_pair(
    host: str = "127.0.0.1",
    sender_tls: PageTls | None = None,
    receiver_tls: PageTls | None = None,
) -> AsyncIterator[Pair]:
    pair = Pair(host, sender_tls, receiver_tls)
    try:
        yield pair
    finally:
        await pair.sender.close()
        await pair.receiver.close()


async def wire_tap(port: int) -> tuple[asyncio.Server, int, list[bytes]]:
    """Relay connections to a port; returns the relay, its port, and what senders sent."""
    sent: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)

        async def copy_back() -> None:
            while some := await up_reader.read(4096):
                writer.write(some)
            writer.close()

        copying = asyncio.create_task(copy_back())
        while some := await reader.read(4096):
            sent.append(some)
            up_writer.write(some)
        up_writer.close()
        await copying

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1], sent


def page_tls(authority: Authority) -> PageTls:
    tls = ClusterLinks(TlsSettings(inside=authority.inside())).page_tls
    assert tls
    return tls
