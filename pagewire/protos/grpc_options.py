"""Options of gRPC that the client, the router and the workers share."""

MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
MAX_CALL_S = 2_592_000  # 30 days; gRPC takes much longer time limits for expired
MAX_PENDING_CALLS = 1_000_000
LISTEN_OPTIONS = (
    # By default gRPC randomly cancels calls beyond 1,000 that wait to be accepted; the router's
    # admission refuses instead.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
    ("grpc.server_handshake_timeout_ms", 10_000),  # of TLS; its default is two minutes
)

# A message up to this size parses within 10 ms, whatever it contains; a server first counts the
# fields of a larger one.
LARGE_REQUEST_BYTES = 64 * 2**10

# Of a GenerateMany stream: afterwards its caller starts calls on another one, because routers end
# old connections, and a stream stays on the connection on which it began.
MAX_STREAM_AGE_S = 300.0

# A process that hangs, or a host that is gone, leaves its connections open: only pings detect it.
# gRPC's own threads send and answer them, even while Python computes or its event loop is late.
PING_AFTER_MS = 1000  # without data
PING_TIMEOUT_MS = 2000
_PINGS = (
    ("grpc.keepalive_time_ms", PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # the lower of the two; its default is 60 s
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
WORKER_CHANNEL_OPTIONS = (  # of channels to workers
    *MESSAGE_OPTIONS,
    *_PINGS,
    ("grpc.min_reconnect_backoff_ms", PING_TIMEOUT_MS),  # also the longest time to connect
    ("grpc.max_reconnect_backoff_ms", PING_TIMEOUT_MS),  # its default is two minutes
)
WORKER_SERVER_OPTIONS = (
    *MESSAGE_OPTIONS,
    *LISTEN_OPTIONS,
    *_PINGS,  # a prefill worker keeps pages for the decode workers that call it
    # Otherwise a server ends connections pinged this often.
    ("grpc.http2.min_ping_interval_without_data_ms", PING_AFTER_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)
