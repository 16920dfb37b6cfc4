"""Work before a request's turn, such as tokenizing: tenants take turns at it and share its room.

Unlike in turns.py, each item of work counts as one: they are short, and what others wait for is the
end of one of them.
"""

import asyncio
from collections import Counter, deque
from typing import Generic, TypeVar

from protos.shares import may_take
from router.tenants.tenant import TenantRules
from router.tenants.turns import FairQueue

T = TypeVar("T")


class Line(Generic[T]):
    """Hands out what is free. Tenants that wait take turns, each in the order of its own callers.

    Invariant: nothing is free while somebody waits.
    """

    def __init__(self) -> None:
        self._free: deque[T] = deque()
        self._waiting: FairQueue[asyncio.Future[T]] = FairQueue()

    def put(self, item: T) -> None:
        """Hand out something that is free."""
        while self._waiting:
            waiter = self._waiting.pop()
            if not waiter.done():  # else its caller has just left
                waiter.set_result(item)
                return
        self._free.append(item)

    async def get(self, tenant: TenantRules) -> T:
        """Wait for a turn of this tenant, and take something. Who is cancelled leaves the line."""
        if self._free:
            return self._free.popleft()
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.push(tenant.name, waiter, cost=1, weight=tenant.weight)
        try:
            return await waiter
        except BaseException:
            self._waiting.remove(tenant.name, waiting)
            if not waiter.cancelled():  # its turn came in the same moment
                self.put(waiter.result())
            raise


class Room:
    """Bounds what waits, so that no tenant fills all of it; see protos/shares.py.

    Args:
        size: The most that fits, in any unit. Alone, anything fits.
    """

    def __init__(self, size: int) -> None:
        self.taken = 0
        self._size = size
        self._own: Counter[str] = Counter()  # tenant |-> what it has taken; none is 0

    def take(self, tenant: TenantRules, amount: int = 1) -> bool:
        """Take room until `leave`; False: there is none, or none for this tenant."""
        if self.taken and not self._fits(tenant, amount):
            return False
        self.taken += amount
        self._own[tenant.name] += amount
        return True

    def leave(self, tenant: TenantRules, amount: int = 1) -> None:
        """Give room back."""
        self.taken -= amount
        self._own[tenant.name] -= amount
        if not self._own[tenant.name]:
            del self._own[tenant.name]

    def _fits(self, tenant: TenantRules, amount: int) -> bool:
        if self.taken + amount > self._size:
            return False
        if not tenant.name:  # the only one
            return True
        # It takes one unit after the other; this is the last.
        own, taken = self._own[tenant.name] + amount - 1, self.taken + amount - 1
        return may_take(own, taken, self._size, tenant.weight)
