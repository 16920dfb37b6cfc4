"""A TLS channel that picks up renewed files: the next call uses a new connection."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from pagewire.protos.pem import LivePem

Options = Sequence[tuple[str, Any]]


class TlsChannel(grpc.aio.Channel):  # type: ignore[misc] # gRPC has no types
    """Replaces its gRPC channel after a renewal: gRPC's channels keep their first credentials.

    Running calls stay on their connection, which closes with the last of them.

    Args:
        address: To connect to.
        pem: Its own certificate and the authority that it trusts; without an authority, gRPC's own
            list of public ones.
        server_name: Name in the server's certificate, if the files tell none; empty: the host of
            the address.
        options: Options of gRPC.
    """

    def __init__(self, address: str, pem: LivePem, server_name: str, options: Options) -> None:
        self._address = address
        self._server_name = server_name
        self._options = tuple(options)
        self._live = pem
        self._pem = pem.current()
        self._link = self._open()
        self._older: set[_Link] = set()  # from before a renewal, with running calls
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._calling(lambda link: link.channel.unary_unary(method, *codec, **options))

    def unary_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._calling(lambda link: link.channel.unary_stream(method, *codec, **options))

    def stream_unary(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._calling(lambda link: link.channel.stream_unary(method, *codec, **options))

    def stream_stream(self, method: str, *codec: Any, **options: Any) -> Callable[..., Any]:
        return self._calling(lambda link: link.channel.stream_stream(method, *codec, **options))

    async def close(self, grace: float | None = None) -> None:
        links = (self._link, *self._older)
        self._older.clear()
        await asyncio.gather(*(each.channel.close(grace) for each in links), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._link.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._link.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._link.channel.channel_ready()

    async def __aenter__(self) -> "TlsChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _calling(self, make: "Callable[[_Link], Callable[..., Any]]") -> Callable[..., Any]:
        of, method = self._link, make(self._link)

        def call(*request: Any, **options: Any) -> Any:
            nonlocal of, method
            self._renew()
            if of is not self._link:
                of, method = self._link, make(self._link)
            made, link = method(*request, **options), of
            link.num_calls += 1
            made.add_done_callback(lambda _: self._end_call(link))
            return made

        return call

    def _renew(self) -> None:
        pem = self._live.current()
        if pem is self._pem:
            return
        older, self._pem = self._link, pem
        self._link = self._open()
        self._older.add(older)
        self._close_if_idle(older)

    def _open(self) -> "_Link":
        pem = self._pem
        credentials = grpc.ssl_channel_credentials(
            pem.authority or None, pem.key or None, pem.certificate or None
        )
        name = pem.other_name or self._server_name
        named = (("grpc.ssl_target_name_override", name),) if name else ()
        options = (*self._options, *named)
        return _Link(grpc.aio.secure_channel(self._address, credentials, options=options))

    def _end_call(self, link: "_Link") -> None:
        link.num_calls -= 1
        self._close_if_idle(link)

    def _close_if_idle(self, link: "_Link") -> None:
        if link.num_calls or link not in self._older:
            return
        self._older.discard(link)
        closing = asyncio.get_running_loop().create_task(link.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class _Link:
    """A gRPC channel and the number of its running calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
