"""The terminal of a client: the commands that talk to a running cluster."""

import os

# gRPC reads this at import. By default it reports each connection that a stopping router ends as if
# something were wrong. Errors are still reported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
