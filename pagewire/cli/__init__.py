"""The terminal of a client: the commands that talk to a running cluster."""

import os

# gRPC reads this when it is imported. It tells of each connection that a stopping router ends, as
# if something were wrong; its errors still come.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
