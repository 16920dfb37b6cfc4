"""Decides who is next while the workers are busy: tenants take turns, by their requests' cost.

Workers serve requests without regard to tenants. So the router gives them little more than they can
start soon, and keeps the rest here. The next turn goes to the waiting tenant that has had the least
for its weight since it began to wait. Its flow of requests is thus served as if that share of the
workers were its own (weighted fair queueing). A tenant that wants less than its share hardly waits,
and the others get the rest. In a tenant's own turns, requests that began at another router come
before new ones.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.expected_wait import TokenRate

LOOK_PERIOD_S = 0.05  # while requests wait: load also changes by what other routers do

T = TypeVar("T")


@dataclass(eq=False, kw_only=True, slots=True)
class Waiting(Generic[T]):
    """An item that waits."""

    item: T
    cost: float
    has_begun: bool


class _Flow(Generic[T]):
    """The waiting items of one name."""

    def __init__(self) -> None:
        self.waiting: deque[Waiting[T]] = deque()  # those that have begun, then new ones
        self.num_begun = 0  # how many have begun
        self.cost = 0.0  # of all
        self.weight = 1.0  # of the newest
        self.had = 0.0  # served cost over weight; begins where the others are


class FairQueue(Generic[T]):
    """Orders the items of several flows. Pure.

    Invariant: a waiting flow has had at least as much as the flow that was served last had had
    before that turn. So a flow that comes back has no claim to what it did not want earlier.
    """

    def __init__(self) -> None:
        self.cost = 0.0  # of all that wait
        self._flows: dict[str, _Flow[T]] = {}
        self._served = 0.0  # what the flow that was served last had had before

    def __bool__(self) -> bool:
        return any(flow.waiting for flow in self._flows.values())

    def push(
        self, name: str, item: T, *, cost: float, weight: float, has_begun: bool = False
    ) -> Waiting[T]:
        """Add an item to the end of its flow; returns the argument of `remove`.

        An item that has begun comes before the flow's new ones. Other flows notice no difference.
        """
        flow = self._flows.setdefault(name, _Flow())
        if not flow.waiting:
            flow.had = max(flow.had, self._served)
        flow.weight = weight
        waiting = Waiting(item=item, cost=cost, has_begun=has_begun)
        flow.waiting.insert(flow.num_begun if has_begun else len(flow.waiting), waiting)
        flow.num_begun += has_begun
        flow.cost += cost
        self.cost += cost
        return waiting

    def peek(self) -> T:
        """Return the next item; call it only while items wait."""
        return self._next().waiting[0].item

    def pop(self) -> T:
        """Remove and return the next item."""
        flow = self._next()
        waiting = flow.waiting.popleft()
        self._served = flow.had
        flow.had += waiting.cost / flow.weight
        self._leave(flow, waiting)
        # A forgotten flow would begin there if it came back: it loses nothing and owes nothing.
        self._flows = {
            name: each
            for name, each in self._flows.items()
            if each.waiting or each.had > self._served
        }
        return waiting.item

    def remove(self, name: str, waiting: Waiting[T]) -> None:
        """Remove an item; no effect if it was popped."""
        flow = self._flows.get(name)
        if flow is not None and waiting in flow.waiting:
            flow.waiting.remove(waiting)
            self._leave(flow, waiting)

    def cost_before(self, name: str, cost: float, weight: float) -> float:
        """Return about how much cost is served before a new item's turn, its own included."""
        flow = self._flows.get(name) or _Flow()
        others = [each for each in self._flows.values() if each.waiting and each is not flow]
        share = weight / (weight + sum(each.weight for each in others))
        return min((flow.cost + cost) / share, self.cost + cost)

    def _next(self) -> _Flow[T]:
        return min(
            (flow for flow in self._flows.values() if flow.waiting), key=lambda each: each.had
        )

    def _leave(self, flow: _Flow[T], waiting: Waiting[T]) -> None:
        flow.num_begun -= waiting.has_begun
        flow.cost -= waiting.cost
        self.cost -= waiting.cost
        if not flow.waiting:
            flow.cost = 0.0  # rounding errors do not add up


class Turns(Generic[T]):
    """Lets requests proceed one by one, as the workers have room for them.

    Args:
        has_room: Returns whether a request may proceed now.
    """

    def __init__(self, has_room: Callable[[T], bool]) -> None:
        self._has_room = has_room
        self._queue: FairQueue[tuple[T, asyncio.Event]] = FairQueue()
        self._is_taken = False  # a request has its turn, and no worker counts it yet
        self._rate = TokenRate()
        self._cost_served = 0
        self._look: asyncio.TimerHandle | None = None  # set while requests wait

    @asynccontextmanager
    async def turn(
        self, name: str, request: T, *, cost: int, weight: float, has_begun: bool = False
    ) -> AsyncIterator[None]:
        """Wait for a request's turn. The body has its worker count it, and does not wait.

        Args:
            name: The tenant's name.
            request: For `has_room`.
            cost: Tokens that it may take.
            weight: The tenant's weight.
            has_begun: Whether it began at another router: it comes before new ones of its tenant.
        """
        if self.is_busy or not self._has_room(request):
            await self._wait(name, request, cost, weight, has_begun)
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self.go_on()

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or has its turn.

        Otherwise one for which there is room may proceed. As in a turn, count it without a wait.
        """
        return bool(self._queue) or self._is_taken

    def expected_wait_s(self, name: str, *, cost: int, weight: float) -> float:
        """Return how long a new request would wait for its turn; 0: nobody waits, or unknown."""
        if not self._queue:
            return 0.0
        return self._rate.seconds(int(self._queue.cost_before(name, cost, weight)))

    def go_on(self) -> None:
        """Let the next request proceed if there is room; call this whenever there may be."""
        if self._queue and not self._is_taken and self._may_go_on(self._queue.peek()[0]):
            self._is_taken = True
            self._queue.pop()[1].set()
        if self._queue and self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(LOOK_PERIOD_S, self._look_again)

    def _may_go_on(self, request: T) -> bool:
        try:
            return self._has_room(request)
        except Exception:
            return True  # it then meets the bug in its own turn, and the caller here does not

    def _look_again(self) -> None:
        self._look = None
        self.go_on()

    async def _wait(self, name: str, request: T, cost: int, weight: float, has_begun: bool) -> None:
        is_next = asyncio.Event()
        waiting = self._queue.push(
            name, (request, is_next), cost=cost, weight=weight, has_begun=has_begun
        )
        self._note()
        self.go_on()
        try:
            await is_next.wait()
        except BaseException:
            if is_next.is_set():  # let the next one proceed instead
                self._is_taken = False
            self._queue.remove(name, waiting)
            self.go_on()
            raise
        self._cost_served += cost
        self._note()

    def _note(self) -> None:
        now = asyncio.get_running_loop().time()
        self._rate.observe(
            num_computed=self._cost_served, num_queued=int(self._queue.cost), now=now
        )
