"""The memory of the bodies that a gateway is reading: bounded, and shared among tenants.

A client may send most of a body and keep the rest until its time is over. Without a bound, as many
of them as there are connections would fill the host's memory.
"""

from collections import Counter
from types import TracebackType

from http_gateway.errors import SERVER, HttpError
from protos.shares import may_take

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
        self._taken: Counter[str] = Counter()  # tenant |-> bytes; only those that have some
        self._num_taken = 0

    def place(self, tenant: str) -> "BodyPlace":
        """Return an empty place for a body of a tenant; use it with `with`."""
        return BodyPlace(self, tenant)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Take room for more bytes.

        Raises:
            HttpError: The tenant's share does not have it.
        """
        last = num_bytes - 1
        if not may_take(self._taken[tenant] + last, self._num_taken + last, self._num_bytes):
            raise _full(self._num_taken, self._num_bytes)
        self._taken[tenant] += num_bytes
        self._num_taken += num_bytes

    def leave(self, tenant: str, num_bytes: int) -> None:
        """Give back room."""
        self._num_taken -= num_bytes
        self._taken[tenant] -= num_bytes
        if not self._taken[tenant]:
            del self._taken[tenant]


class BodyPlace:
    """The room of one body, which it leaves at the end of a `with` block."""

    def __init__(self, room: BodyRoom, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold a body that has grown to this size; raises HttpError if there is no room."""
        if num_bytes > SMALL_BYTES:
            self._room.take(self._tenant, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def __enter__(self) -> "BodyPlace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_bytes:
            self._room.leave(self._tenant, self._num_bytes)


def _full(num_taken: int, num_bytes: int) -> HttpError:
    return HttpError(
        503,
        f"body: found bodies of {num_taken / MIB:.0f} MiB that are still being read; allowed: "
        f"{num_bytes / MIB:.0f} MiB, shared among tenants; try again",
        kind=SERVER,
        code="too_many_bodies",
        headers=(("retry-after", str(RETRY_AFTER_S)),),
    )
