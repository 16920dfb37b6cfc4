"""Puts requests that wait for a stream into one message, which is cheaper than one each."""

from collections import deque
from typing import Any, TypeVar

from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES

READS_MORE_KEY = "pagewire-reads-more"  # header of a router that reads GenerateManyRequest.more
MAX_MORE = 255  # requests within another one
ENVELOPE_BYTES = 16  # most bytes around each of them

# A GenerateManyRequest or a SessionRequest
Request = TypeVar("Request", bound=Any)


def gather(waiting: deque[Request]) -> Request:
    """Take requests from a non-empty queue; return the first with the others in its `more`.

    The result is not a large message unless one of them is.
    """
    first = waiting.popleft()
    num_bytes = first.ByteSize()
    more: list[Request] = []
    while waiting and len(more) < MAX_MORE:
        num_bytes += waiting[0].ByteSize() + ENVELOPE_BYTES
        if num_bytes > LARGE_REQUEST_BYTES:
            break
        more.append(waiting.popleft())
    first.more.extend(more)
    return first
