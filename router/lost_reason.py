"""Says why a worker or the controller is lost, for logs and the cluster's status."""

import grpc

MAX_CHARS = 400


def lost_reason(error: Exception) -> str:
    """Return a reason in one printable line, never empty.

    The details of a gRPC error may be anything: whatever listens at the peer's address writes them.
    """
    told = str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        told = f"{error.code().name}: {error.details()}"
    line = " ".join(told.split()) or type(error).__name__
    line = "".join(each if each.isprintable() else "\ufffd" for each in line)
    return line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…"
