"""Turns: in which order, and that nobody is left behind."""

import asyncio
import random
from collections import Counter

import pytest

from router.tenants.turns import FairQueue, Turns
from tests.support.virtual_time import run_virtual


def order(queue: FairQueue[str]) -> str:
    served = []
    while queue:
        first = queue.peek()
        served.append(queue.pop())
        assert served[-1] is first
    assert queue.cost == 0
    return "".join(served)


def test_tenants_take_turns_and_each_is_served_in_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abcdef":
        queue.push("flood", item, cost=1, weight=1)
    for item in "XY":
        queue.push("other", item, cost=1, weight=1)

    assert order(queue) == "aXbYcdef"


def test_turns_go_by_cost_and_weight() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(4):
        queue.push("long", "L", cost=4, weight=1)
    for _ in range(16):
        queue.push("short", "s", cost=1, weight=1)
    assert Counter(order(queue)[:10]) == {"L": 2, "s": 8}

    for _ in range(40):
        queue.push("heavy", "H", cost=1, weight=3)
        queue.push("light", "l", cost=1, weight=1)
    assert Counter(order(queue)[:40]) == {"H": 30, "l": 10}


def test_a_tenant_that_was_away_has_no_claim_on_that_time() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.push("busy", "b", cost=1, weight=1)
        queue.pop()
    for _ in range(6):
        queue.push("busy", "b", cost=1, weight=1)
        queue.push("late", "l", cost=1, weight=1)

    assert Counter(order(queue)[:6]) == {"b": 3, "l": 3}


def test_one_that_leaves_is_passed_over() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "1", cost=1, weight=1)
    leaving = queue.push("a", "2", cost=1, weight=1)
    queue.push("a", "3", cost=1, weight=1)
    queue.remove("a", leaving)
    queue.remove("a", leaving)

    assert order(queue) == "13"


def test_what_had_begun_comes_before_what_is_new_of_its_tenant_alone() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.push("flood", item, cost=1, weight=1)
    for item in "XYZ":
        queue.push("other", item, cost=1, weight=1)
    queue.push("flood", "1", cost=1, weight=1, has_begun=True)
    leaving = queue.push("flood", "2", cost=1, weight=1, has_begun=True)
    queue.push("flood", "3", cost=1, weight=1, has_begun=True)
    queue.remove("flood", leaving)

    assert queue.pop() == "1"
    queue.push("flood", "4", cost=1, weight=1, has_begun=True)
    assert order(queue) == "X3Y4Zabc"


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_always_want_more_get_their_share_whatever_others_do(seed: int) -> None:
    rng = random.Random(seed)
    queue: FairQueue[tuple[str, int]] = FairQueue()
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    had: Counter[str] = Counter()

    def push(name: str, weight: float) -> None:
        cost = rng.choice([1, 10, 300])
        begun = rng.random() < 0.4
        queue.push(name, (name, cost), cost=cost, weight=weight, has_begun=begun)

    for name, weight in weights.items():
        push(name, weight)
    for _ in range(3000):
        if rng.random() < 0.3:
            push(f"other-{rng.randrange(5)}", 1.0)
        name, cost = queue.pop()
        had[name] += cost
        if name in weights:
            push(name, weights[name])
    shares = [had[name] / weight for name, weight in weights.items()]
    assert max(shares) - min(shares) <= 2 * 300, "they differ by a request each, at most"


def test_the_wait_of_a_tenant_is_that_behind_its_own_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):
        queue.push("flood", "f", cost=10, weight=1)

    assert queue.cost_before("flood", 10, 1) == 1010
    assert queue.cost_before("other", 10, 1) == 20
    assert queue.cost_before("other", 10, 4) == 12.5


class Workers:
    """Have room for so many at a time."""

    def __init__(self, num_places: int) -> None:
        self.num_free = num_places
        self.turns: Turns[str] = Turns(lambda request: self.num_free > 0)
        self.served: list[str] = []

    async def serve(self, name: str, service_s: float = 1.0) -> None:
        async with self.turns.turn(name, name, cost=100, weight=1.0):
            assert self.num_free > 0, "room was taken by two"
            self.num_free -= 1
            self.served.append(name)
        try:
            await asyncio.sleep(service_s)
        finally:
            self.num_free += 1
            self.turns.go_on()


def test_one_that_comes_into_a_flood_waits_for_its_share_only() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        workers = Workers(2)
        flood = [asyncio.create_task(workers.serve("flood")) for _ in range(50)]
        await asyncio.sleep(0.5)
        for _ in range(3):
            started_at = loop.time()
            await workers.serve("other")
            assert loop.time() - started_at <= 2.0 + 0.01, "a place, and its own second"
        assert loop.time() < 10
        await asyncio.gather(*flood)
        assert loop.time() == pytest.approx(27, abs=1), "no place was ever idle"

    run_virtual(main())


def test_those_who_give_up_hold_up_nobody() -> None:
    async def main() -> None:
        workers = Workers(0)
        tasks = [asyncio.create_task(workers.serve(f"flood-{i}")) for i in range(5)]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        await asyncio.sleep(0.5)
        workers.num_free = 1
        workers.turns.go_on()
        tasks[0].cancel()  # it is its turn, and it does not know yet
        await asyncio.wait(tasks, timeout=10)
        assert workers.served == ["flood-2", "flood-3", "flood-4"]
        await workers.serve("later")
        assert workers.num_free == 1

    run_virtual(main())


def test_a_bug_that_a_request_meets_is_met_in_its_own_turn_and_holds_up_nobody() -> None:
    async def main() -> None:
        workers = Workers(1)

        def has_room(request: str) -> bool:
            if request == "bad":
                raise ZeroDivisionError("a bug")
            return workers.num_free > 0

        workers.turns = Turns(has_room)

        async def meet_the_bug() -> None:
            async with workers.turns.turn("bad", "bad", cost=100, weight=1.0):
                has_room("bad")

        first = asyncio.create_task(workers.serve("first"))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(workers.serve("waiting"))
        await asyncio.sleep(0.1)
        bad = asyncio.create_task(meet_the_bug())
        await asyncio.gather(first, waiting, workers.serve("last"))

        with pytest.raises(ZeroDivisionError):
            await bad
        assert workers.served == ["first", "waiting", "last"]

    run_virtual(main())


def test_the_expected_wait_follows_what_was_served() -> None:
    async def main() -> None:
        workers = Workers(1)
        expected = workers.turns.expected_wait_s
        assert expected("flood", cost=100, weight=1.0) == 0
        tasks = [asyncio.create_task(workers.serve("flood")) for _ in range(40)]
        await asyncio.sleep(0.5)
        assert expected("flood", cost=100, weight=1.0) == 0, "not known yet"
        await asyncio.sleep(5)
        assert expected("flood", cost=100, weight=1.0) == pytest.approx(35, abs=2)
        assert expected("other", cost=100, weight=1.0) == pytest.approx(2, abs=0.5)
        await asyncio.gather(*tasks)

    run_virtual(main())
