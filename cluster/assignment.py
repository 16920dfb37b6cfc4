"""Decides on which host each worker runs: prefill and decode workers share hosts where they fit.

Within a host pages move over NVLink or memory, between hosts over the network. A router may pair
any prefill worker with any decode worker: the fewer pairs lie across hosts, the fewer pages cross
the network. The decision uses amounts alone: nothing here knows Ray.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.membership import PoolName

UNITS = 10_000  # of one, in which Ray counts resources
# Steps of the search, about a second; the answer is the best one where fewer suffice, as for 64
# workers on 8 hosts of 8 GPUs.
MAX_STEPS = 1_000_000
LEAST_WIDTH = 64  # states that are always kept

Filling = tuple[int, ...]  # of one host: how many workers of each wish
Left = tuple[int, ...]  # how many workers of each wish have no host yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """One host, with its free resources."""

    node_id: str
    free: Mapping[str, float]  # resource |-> amount
    num_prefill: int = 0  # workers that are there already
    num_decode: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Workers of a role with equal needs."""

    role: PoolName
    needs: Mapping[str, float]  # of each; resource |-> amount
    worker_ids: Sequence[str]


def assign(rooms: Sequence[Room], wishes: Sequence[Wish]) -> dict[str, str]:
    """Return the host of each worker that has room somewhere, by its node_id.

    As many workers as possible get a host; then as few pairs of a prefill and a decode worker as
    possible lie on two. Of equal answers the first hosts get most. No host gives more than it has.
    Beyond MAX_STEPS the answer may be worse than the best one.
    """
    fillings = [list(_fillings(room, wishes)) for room in rooms]
    width = max(LEAST_WIDTH, MAX_STEPS // max(1, sum(map(len, fillings))))
    # Left |-> pairs on one host so far, and the fillings that led there, the last one outermost
    states: dict[Left, tuple[int, Any]] = {tuple(len(each.worker_ids) for each in wishes): (0, ())}
    for room, choices in zip(rooms, fillings, strict=True):
        gains = [(choice, _gain(room, wishes, choice)) for choice in choices]
        following: dict[Left, tuple[int, Any]] = {}
        for left, (pairs, trail) in states.items():
            for filling, gain in gains:
                rest = tuple(map(int.__sub__, left, filling))
                if rest and min(rest) < 0:
                    continue
                if rest not in following or pairs + gain > following[rest][0]:
                    following[rest] = pairs + gain, (trail, filling)
        states = _narrowed(following, width)
    best = min(states, key=lambda left: (sum(left), -states[left][0]))
    return _named(rooms, wishes, states[best][1])


def _fillings(room: Room, wishes: Sequence[Wish]) -> Iterator[Filling]:
    """Yield all fillings of a host, the largest first."""

    def fill(free: dict[str, int], number: int) -> Iterator[Filling]:
        if number == len(wishes):
            yield ()
            return
        needs = {name: _units(amount) for name, amount in wishes[number].needs.items()}
        most = len(wishes[number].worker_ids)
        for name, amount in needs.items():
            if amount:
                most = min(most, free.get(name, 0) // amount)
        for count in range(most, -1, -1):
            taken = {name: free.get(name, 0) - count * amount for name, amount in needs.items()}
            for others in fill(free | taken, number + 1):
                yield (count, *others)

    yield from fill({name: _units(amount) for name, amount in room.free.items()}, 0)


def _gain(room: Room, wishes: Sequence[Wish], filling: Filling) -> int:
    """Return how many pairs a filling puts on a host."""
    prefill, decode = room.num_prefill, room.num_decode
    for wish, count in zip(wishes, filling, strict=True):
        if wish.role == "prefill":
            prefill += count
        else:
            decode += count
    return prefill * decode - room.num_prefill * room.num_decode


def _narrowed(states: dict[Left, tuple[int, Any]], width: int) -> dict[Left, tuple[int, Any]]:
    """Keep the states with the most pairs, and the one with the fewest workers left."""
    if len(states) <= width:
        return states
    fullest = min(states, key=sum)
    best = sorted(states, key=lambda left: (-states[left][0], sum(left)))[: width - 1]
    return {left: states[left] for left in dict.fromkeys([*best, fullest])}


def _named(rooms: Sequence[Room], wishes: Sequence[Wish], trail: Any) -> dict[str, str]:
    """Give the names of each wish to the hosts, in their order."""
    fillings: list[Filling] = []
    while trail:
        trail, filling = trail
        fillings.append(filling)
    names = [iter(each.worker_ids) for each in wishes]
    return {
        next(names[number]): room.node_id
        for room, filling in zip(rooms, reversed(fillings), strict=True)
        for number, count in enumerate(filling)
        for _ in range(count)
    }


def _units(amount: float) -> int:
    return round(amount * UNITS)
