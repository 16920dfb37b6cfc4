"""gRPC servers that no call can end.

grpc.aio reads the name of a call's method in the task that accepts all calls (grpcio 1.85). A name
that is not UTF-8 ends that task, and with it the server: one call of a stranger would end a router
or a worker, before any interceptor. Core compares the names of registered methods by itself, so
these servers answer all other calls here, and grpc.aio never reads what a caller wrote.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # grpc.aio has no way to replace the task, or to ask it for a name


def rpc_server(
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    options: Sequence[tuple[str, int]],
) -> grpc.aio.Server:
    """Return a server for services that generated code adds, which registers their methods.

    A call of any other method ends with UNIMPLEMENTED, whoever makes it; no interceptor sees it.

    Raises:
        RuntimeError: This grpcio has no such parts, so a call could end its servers.
    """
    ordinary, cygrpc.AioServer = cygrpc.AioServer, _RegisteredOnly
    try:
        server = grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = ordinary
    has_parts = all(hasattr(cygrpc, name) for name in ("_handle_rpc", "_schedule_rpc_coro"))
    is_ours = isinstance(getattr(server, "_server", None), _RegisteredOnly)
    if not (has_parts and is_ours and hasattr(ordinary, "_request_call")):
        raise RuntimeError(
            f"grpcio: found {grpc.__version__}; allowed: 1.85, whose server is known"
        )
    return server


class _RegisteredOnly(cygrpc.AioServer):  # type: ignore[misc] # grpc has no types
    """Accepts calls of registered methods, and refuses the others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._refusals: set[asyncio.Task[None]] = set()  # held until they end

    async def _request_call(self) -> None:
        """Refuse calls of other methods, one after the other, until the server stops."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(call: Any) -> None:
    """Answer a call as grpc.aio does where it finds no handler."""
    loop, name = asyncio.get_running_loop(), "unknown"
    refusing = cygrpc._handle_rpc(name, _NoMethods(), (), call, loop, False)
    await cygrpc._schedule_rpc_coro(refusing, call, loop, name)


class _NoMethods:
    """As grpc.aio looks for a method's handler."""

    def resolve_handler(self, _: Any) -> None:
        """Find none."""
