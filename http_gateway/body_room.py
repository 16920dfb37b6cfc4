"""The memory of the bodies that a gateway is reading: bounded, and shared among tenants.

A client may send most of a body and withhold the rest until its time is over. Without a bound, one
such body on each connection would fill the host's memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from http_gateway.errors import SERVER, HttpError
from protos.shares import Room

SMALL_BYTES = 64 * 1024  # bodies up to this size need no room: connections are bounded, too
RETRY_AFTER_S = 1
MIB = 2**20


class BodyRoom:
    """Room for the large bodies of all requests.

    Args:
        num_bytes: Most bytes of all of them.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._room = Room(num_bytes)

    @contextmanager
    def place(self, tenant: str) -> Iterator["BodyPlace"]:
        """Yield an empty place for a body of a tenant; at the end it is left."""
        place = BodyPlace(self, tenant)
        try:
            yield place
        finally:
            self._room.leave(tenant, place.num_bytes)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Take room for more bytes.

        Raises:
            HttpError: The tenant's share does not have it.
        """
        if not self._room.take(tenant, num_bytes):
            raise _full(self._room.taken, self._num_bytes)


class BodyPlace:
    """The room of one body.

    Attributes:
        num_bytes: What it holds; 0: no room.
    """

    def __init__(self, room: BodyRoom, tenant: str) -> None:
        self.num_bytes = 0
        self._room = room
        self._tenant = tenant

    def hold(self, num_bytes: int) -> None:
        """Hold a body that has grown to this size; raises HttpError if there is no room."""
        if num_bytes > SMALL_BYTES:
            self._room.take(self._tenant, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes


def _full(num_taken: int, num_bytes: int) -> HttpError:
    return HttpError(
        503,
        f"body: found bodies of {num_taken / MIB:.0f} MiB that are still being read; allowed: "
        f"{num_bytes / MIB:.0f} MiB, shared among tenants; try again",
        kind=SERVER,
        code="too_many_bodies",
        headers=(("retry-after", str(RETRY_AFTER_S)),),
    )
