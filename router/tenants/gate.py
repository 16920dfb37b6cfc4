"""The door of a router's front: a call names its tenant by a token, or is refused.

The token is in the metadata, `authorization: Bearer TOKEN` (RFC 6750). The gate checks it before a
message is read and before any other code of the server runs. All methods of a server are closed,
except the standard services that credentials.rules calls open.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from credentials.rules import is_open
from observability.rare_line import RareLine
from router.errors import NotAuthenticated
from router.tenants.file import digest_of
from router.tenants.registry import Tenants
from router.tenants.tenant import Tenant

log = logging.getLogger(__name__)

HEADER = "authorization"
ALLOWED = "`authorization: Bearer TOKEN` with a token of this cluster"
MAX_CHARS = 4096
_BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.ASCII | re.IGNORECASE)

# SHA-256 of the current call's token; empty: the call needs none.
_digest: ContextVar[bytes] = ContextVar("token digest", default=b"")


def current_tenant(tenants: Tenants) -> Tenant:
    """Return the tenant of the current call; also works in tasks that the call has started.

    Raises:
        NotAuthenticated: Its token is no longer valid.
    """
    if tenants.is_open:
        return tenants.own
    tenant = tenants.of(_digest.get())
    if tenant is None:
        raise NotAuthenticated(f"the token is unknown; allowed: {ALLOWED}")
    return tenant


def caller_name(tenants: Tenants) -> str:
    """Return the name of the current call's tenant; empty: it needs none."""
    tenant = tenants.of(_digest.get())
    return tenant.name if tenant else ""


def is_operator(tenants: Tenants, authorization: str) -> bool:
    """Return whether an HTTP request with this header may see the whole cluster."""
    if tenants.is_open:
        return True
    try:
        tenant = tenants.of(_token_digest([(HEADER, authorization)]))
    except NotAuthenticated:
        return False
    return tenant is not None and tenant.rules.operator


class TenantGate(grpc.aio.ServerInterceptor):  # type: ignore[misc] # gRPC has no types
    """Refuses calls without a tenant's token; handlers read `current_tenant`.

    Args:
        tenants: The tenants whose tokens are valid.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._refusals = RareLine(log, logging.WARNING, "call_refused")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if self._tenants.is_open or is_open(details.method):
            return await continuation(details)
        try:
            _digest.set(_token_digest(details.invocation_metadata))
            current_tenant(self._tenants)
        except NotAuthenticated as error:
            return self._refusing(details.method, error)
        return await continuation(details)

    def _refusing(self, method: str, error: NotAuthenticated) -> grpc.RpcMethodHandler:
        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            self._refusals.write(method=method, peer=context.peer(), reason=str(error))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

        # A stream handler, because a unary one would first wait for the request.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _token_digest(metadata: Any) -> bytes:
    """Return the SHA-256 of a call's token; NotAuthenticated: the call has none."""
    values = [value for key, value in metadata or () if key == HEADER]
    if not values:
        raise NotAuthenticated(f"the call has no token; allowed: {ALLOWED}")
    if len(values) > 1:
        raise NotAuthenticated(f"authorization: found {len(values)} values; allowed: {ALLOWED}")
    [value] = values
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    match = _BEARER.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match is None:  # not shown: it may be a token all the same
        found = f"{len(text)} characters that are not a bearer token"
        raise NotAuthenticated(f"authorization: found {found}; allowed: {ALLOWED}")
    return digest_of(match[1].encode())
