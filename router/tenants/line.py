"""Work before a request's turn, such as tokenizing: tenants take turns at it.

Unlike in turns.py, each item of work counts as one: they are short, and what others wait for is the
end of one of them.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

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
