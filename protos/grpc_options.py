"""Options of gRPC that the client, the router and the workers share."""

MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
MAX_PENDING_CALLS = 1_000_000
LISTEN_OPTIONS = (
    # gRPC cancels calls that wait to be accepted, above 1,000 at random; the router's admission
    # refuses instead.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
)
