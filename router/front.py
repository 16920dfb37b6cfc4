"""The gRPC server that clients connect to, with limits that no client can exceed.

With a tenants file the door authenticates each call first, and no tenant can take all places.
"""

from functools import partial

import grpc

from pagewire.protos.grpc_options import LISTEN_OPTIONS, MAX_MESSAGE_BYTES, MAX_STREAM_AGE_S
from protos.call_guard import CallGuard
from protos.rpc_server import rpc_server
from router.config import RouterConfig
from router.tenants.gate import TenantGate, caller_name
from router.tenants.registry import Tenants
from router.validation import MAX_REQUEST_FIELDS

MIN_PING_INTERVAL_MS = 1_500  # the client's own is twice as long
KEEPALIVE_MS = 30_000  # a client whose host is gone leaves no other sign
PING_TIMEOUT_MS = 20_000
IDLE_MS = 600_000  # a client's channel connects again by itself
CONNECTION_AGE_MS = 3_600_000
MAX_INT = 2**31 - 1


def make_server(
    config: RouterConfig, tenants: Tenants | None = None, *, shares_port: bool = False
) -> grpc.aio.Server:
    """Return a server without services and ports.

    Args:
        config: Limits.
        tenants: The callers allowed; None: any.
        shares_port: Other processes of this user may listen on the same port: the kernel gives each
            of them a part of the connections.
    """
    tenants = tenants or Tenants()
    guard = CallGuard(
        max_calls=max_open_calls(config),
        max_fields=MAX_REQUEST_FIELDS,
        retry_delay_s=config.retry_delay_s,
        caller=None if tenants.is_open else partial(caller_name, tenants),
    )
    options = dict(server_options(config)) | {"grpc.so_reuseport": int(shares_port)}
    interceptors = [TenantGate(tenants), guard]
    return rpc_server(interceptors=interceptors, options=tuple(options.items()))


def max_open_calls(config: RouterConfig) -> int:
    """Return how many calls of a method may be open: the served ones, and as many that end.

    A call that was refused, or whose client reads nothing, ends when its status is delivered.
    """
    return 2 * config.max_active_requests


def server_options(config: RouterConfig) -> tuple[tuple[str, int], ...]:
    """Return the options of the server that clients connect to."""
    # Enough for the last call that begins on the last stream of a connection.
    grace_s = 2 * MAX_STREAM_AGE_S + config.request_timeout_s
    return (
        *LISTEN_OPTIONS,
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Parsing a message delays all streams.
        ("grpc.max_receive_message_length", config.max_request_bytes),
        # Per connection. Calls that arrive before the client knows the limit break, so it leaves
        # the guard room to refuse them with a reason.
        ("grpc.max_concurrent_streams", 2 * max_open_calls(config)),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        # The only way to end a call whose client takes neither messages nor the status.
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
        ("grpc.max_connection_age_grace_ms", min(MAX_INT, int(1000 * grace_s))),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # Clients ping while they wait. By default a server ends connections that are pinged more
        # than once in five minutes without an answer on its way.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    )
