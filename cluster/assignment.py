"""Decides on which host each worker runs: prefill and decode workers share hosts where they fit.

Within a host pages move over NVLink or memory, between hosts over the network. A router may pair
any prefill worker with any decode worker: the fewer pairs lie across hosts, the fewer pages cross
the network. The decision uses amounts alone: nothing here knows Ray.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from router.membership import WorkerRole

UNITS = 10_000  # of one, in which Ray counts resources
# Steps of the search, about a fifth of a second; the answer is the best one where fewer suffice, as
# for 64 workers on 8 hosts of 8 GPUs.
MAX_STEPS = 500_000
LEAST_WIDTH = 64  # states that are kept, however many fillings the hosts have
WISH_STEPS = 8  # as many steps take the time of finding a wish's number in a filling

Filling = tuple[int, ...]  # of one host: how many workers of each wish
Free = Mapping[str, float]  # of one host: resource |-> units
# How many workers of each wish have no host yet: fields of one number. Above each is a guard bit,
# which the subtraction of a filling clears if it takes more than is left.
Left = int
# Pairs on one host so far, workers without a host, and the fillings that led there, the last one
# outermost.
State = tuple[int, int, Any]


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

    role: WorkerRole
    needs: Mapping[str, float]  # of each; resource |-> amount
    worker_ids: Sequence[str]


def assign(rooms: Sequence[Room], wishes: Sequence[Wish]) -> dict[str, str]:
    """Return the host of each worker that has room somewhere, by its node_id.

    As many workers as possible get a host; then as few pairs of a prefill and a decode worker as
    possible lie on two. Of equal answers the first hosts get most. No host gives more than it has.

    Beyond MAX_STEPS the answer may be worse than the best one. Then the search tries only some
    fillings of a host that has many, and after each host it keeps only the states with the most
    pairs. Still, no worker stays without a host that has room for it.
    """
    rooms = [replace(each, free=_units(each.free)) for each in rooms]
    wishes = [replace(each, needs=_units(each.needs)) for each in wishes]
    width_of_field = max((len(each.worker_ids) for each in wishes), default=0).bit_length() + 1

    def packed(counts: Iterable[int]) -> int:
        return sum(count << width_of_field * number for number, count in enumerate(counts))

    counts = [len(each.worker_ids) for each in wishes]
    guards = packed([1 << width_of_field - 1] * len(wishes))
    steps_of_filling = max(LEAST_WIDTH, WISH_STEPS * len(wishes))
    limit = max(1, MAX_STEPS // (steps_of_filling * max(1, len(rooms))))
    fillings = [_fillings(room, wishes, limit) for room in rooms]
    width = max(1, MAX_STEPS // max(1, sum(map(len, fillings))))
    states: dict[Left, State] = {guards + packed(counts): (0, sum(counts), ())}
    for room, some in zip(rooms, fillings, strict=True):
        choices = [(packed(each), sum(each), _gain(room, wishes, each), each) for each in some]
        following: dict[Left, State] = {}
        for left, (pairs, num_left, trail) in states.items():
            for taken, num_taken, gain, filling in choices:
                rest = left - taken
                if rest & guards == guards and (
                    rest not in following or pairs + gain > following[rest][0]
                ):
                    following[rest] = pairs + gain, num_left - num_taken, (trail, filling)
        states = _narrowed(following, width)
    # The one with most pairs may leave workers out, though there is room for them.
    ends = (
        min(states.values(), key=lambda each: (each[1], -each[0])),
        max(states.values(), key=lambda each: each[0]),
    )
    answers = [_topped_up(rooms, wishes, _followed(trail)) for _, _, trail in ends]
    return _named(rooms, wishes, max(answers, key=partial(_worth, rooms, wishes)))


def _fillings(
    room: Room, wishes: Sequence[Wish], limit: int, *, is_thinned: bool = False
) -> list[Filling]:
    """Return the fillings of a host, the largest first; of more than `limit`, some of all sizes."""
    begun: list[tuple[Filling, Free]] = [((), room.free)]
    for number, wish in enumerate(wishes):
        share = float("inf")  # of the fillings that may follow from each of these
        if is_thinned:
            share = limit / len(begun)
            share = max(min(share, 2.0), share ** (1 / (len(wishes) - number)))
        following: list[tuple[Filling, Free]] = []
        for filling, free in begun:
            counts = _spread(_num_fitting(free, wish), share)
            if len(following) + len(counts) > limit:
                return _fillings(room, wishes, limit, is_thinned=True)
            following += [((*filling, each), _without(free, wish, each)) for each in counts]
        begun = following
    nothing = (0,) * len(wishes)  # whatever is left, it can follow
    return list(dict.fromkeys([*(filling for filling, _ in begun), nothing]))


def _spread(most: int, share: float) -> Sequence[int]:
    """Return counts from `most` to 0 in equal steps: no more than `share`, and at least one."""
    if most + 1 <= share:
        return range(most, -1, -1)
    steps = int(share) - 1
    return [most * step // steps for step in range(steps, -1, -1)] if steps else [most]


def _num_fitting(free: Free, wish: Wish) -> int:
    """Return how many workers of a wish have room."""
    fitting = (int(free.get(name, 0) // amount) for name, amount in wish.needs.items())
    return min([len(wish.worker_ids), *fitting])


def _without(free: Free, wish: Wish, count: int) -> Free:
    """Return what is left when a host takes workers of a wish."""
    if not count:
        return free
    return {**free, **{name: free[name] - count * amount for name, amount in wish.needs.items()}}


def _gain(room: Room, wishes: Sequence[Wish], filling: Sequence[int]) -> int:
    """Return how many pairs a filling puts on a host."""
    present = _num_workers(room, wishes, filling)
    return present["prefill"] * present["decode"] - room.num_prefill * room.num_decode


def _num_workers(
    room: Room, wishes: Sequence[Wish], filling: Sequence[int]
) -> dict[WorkerRole, int]:
    """Return how many workers of each role a host then has."""
    present: dict[WorkerRole, int] = {"prefill": room.num_prefill, "decode": room.num_decode}
    for wish, count in zip(wishes, filling, strict=True):
        present[wish.role] += count
    return present


def _worth(
    rooms: Sequence[Room], wishes: Sequence[Wish], fillings: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return how many workers get a host, and how many pairs they add that share one."""
    gains = (_gain(room, wishes, each) for room, each in zip(rooms, fillings, strict=True))
    return sum(map(sum, fillings)), sum(gains)


def _narrowed(states: dict[Left, State], width: int) -> dict[Left, State]:
    """Keep the states with the most pairs, and the one with the fewest workers left."""
    if len(states) <= width:
        return states
    fullest = min(states, key=lambda left: states[left][1])
    best = sorted(states, key=lambda left: (-states[left][0], states[left][1]))[: width - 1]
    return {left: states[left] for left in dict.fromkeys([*best, fullest])}


def _followed(trail: Any) -> list[Filling]:
    """Return the fillings of a trail, in the order of their hosts."""
    fillings: list[Filling] = []
    while trail:
        trail, filling = trail
        fillings.append(filling)
    return fillings[::-1]


def _topped_up(
    rooms: Sequence[Room], wishes: Sequence[Wish], fillings: Sequence[Filling]
) -> list[list[int]]:
    """Give room to workers that a shortened search left out: first where most partners are."""
    counts = [list(each) for each in fillings]
    free: list[Free] = [room.free for room in rooms]
    present = [_num_workers(room, wishes, each) for room, each in zip(rooms, counts, strict=True)]
    for number, wish in enumerate(wishes):
        for index, each in enumerate(counts):
            free[index] = _without(free[index], wish, each[number])
    for number, wish in enumerate(wishes):
        num_left = len(wish.worker_ids) - sum(each[number] for each in counts)
        if not num_left:
            continue
        partners: WorkerRole = "decode" if wish.role == "prefill" else "prefill"
        for index in sorted(range(len(rooms)), key=lambda index: -present[index][partners]):
            added = min(num_left, _num_fitting(free[index], wish))
            free[index] = _without(free[index], wish, added)
            present[index][wish.role] += added
            counts[index][number] += added
            num_left -= added
    return counts


def _named(
    rooms: Sequence[Room], wishes: Sequence[Wish], fillings: Iterable[Iterable[int]]
) -> dict[str, str]:
    """Give the names of each wish to the hosts, in their order."""
    names = [iter(each.worker_ids) for each in wishes]
    return {
        next(names[number]): room.node_id
        for room, filling in zip(rooms, fillings, strict=True)
        for number, count in enumerate(filling)
        for _ in range(count)
    }


def _units(amounts: Mapping[str, float]) -> dict[str, int]:
    """Return amounts as whole numbers, which add up without rounding; without those of nothing."""
    units = {name: round(amount * UNITS) for name, amount in amounts.items()}
    return {name: amount for name, amount in units.items() if amount}
