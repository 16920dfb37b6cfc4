"""Which worker gets which host: a table, and properties against a search of everything."""

import itertools
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import assignment
from cluster.assignment import Room, Wish, assign
from cluster.pool_config import role_of


def gpus(*numbers):
    return [Room(node_id=f"h{index}", free={"GPU": float(n)}) for index, n in enumerate(numbers)]


def wishes(prefill, decode, **needs):
    needs = needs or {"GPU": 1.0}
    return [
        Wish(role="prefill", needs=needs, worker_ids=[f"prefill-{i}" for i in range(prefill)]),
        Wish(role="decode", needs=needs, worker_ids=[f"decode-{i}" for i in range(decode)]),
    ]


def told(rooms, found):
    """Say which workers each host gets, as `h0 p0 d0`."""
    short = {name: f"{name[0]}{name.rpartition('-')[2]}" for name in found}
    return ", ".join(
        " ".join([room.node_id, *(short[name] for name, at in found.items() if at == room.node_id)])
        for room in rooms
    )


@pytest.mark.parametrize(
    ("rooms", "asked", "expected"),
    [
        (gpus(2, 2), wishes(1, 1), "h0 p0 d0, h1"),
        (gpus(1, 2), wishes(1, 1), "h0, h1 p0 d0"),
        (gpus(1, 1), wishes(1, 1), "h0 p0, h1 d0"),
        (gpus(8, 8), wishes(4, 4), "h0 p0 p1 p2 p3 d0 d1 d2 d3, h1"),
        (gpus(4, 4), wishes(4, 4), "h0 p0 p1 d0 d1, h1 p2 p3 d2 d3"),
        (gpus(4, 4), wishes(2, 6), "h0 p0 d0 d1 d2, h1 p1 d3 d4 d5"),
        (gpus(1, 3, 1), wishes(1, 2), "h0, h1 p0 d0 d1, h2"),
        (gpus(2), wishes(2, 2), "h0 p0 d0"),
        (gpus(), wishes(1, 1), ""),
        (gpus(1), wishes(0, 0), "h0"),
    ],
)
def test_workers_of_both_roles_share_hosts_where_they_fit(rooms, asked, expected):
    assert told(rooms, assign(rooms, asked)) == expected


def test_a_new_worker_joins_the_host_where_those_are_that_it_talks_with():
    rooms = [
        Room(node_id="a", free={"GPU": 1.0}, num_decode=3),
        Room(node_id="b", free={"GPU": 1.0}, num_prefill=1),
    ]

    assert assign(rooms, wishes(0, 1)) == {"decode-0": "b"}
    assert assign(rooms, wishes(1, 0)) == {"prefill-0": "a"}


def test_hosts_that_a_pool_cannot_use_are_left_to_the_others():
    rooms = [
        Room(node_id="a", free={"GPU": 2.0, "accelerator_type:L4": 1.0}),
        Room(node_id="b", free={"GPU": 2.0, "accelerator_type:H100": 1.0}),
    ]
    small = {"GPU": 1.0, "accelerator_type:L4": 0.001}
    asked = [
        *wishes(1, 1),
        Wish(role="decode", needs=small, worker_ids=["decode-small-0", "decode-small-1"]),
    ]

    found = assign(rooms, asked)

    assert found["decode-small-0"] == found["decode-small-1"] == "a"
    assert found["prefill-0"] == found["decode-0"] == "b"


def test_shares_of_a_resource_add_up_as_ray_counts_them():
    rooms = [Room(node_id="a", free={"GPU": 1.0})]

    assert len(assign(rooms, wishes(5, 5, GPU=0.1))) == 10


def test_many_hosts_are_filled():
    rooms = gpus(*[8] * 64)

    found = assign(rooms, wishes(200, 312))

    assert Counter(found.values()) == {room.node_id: 8 for room in rooms}


@pytest.mark.parametrize("num_hosts", [4, 50, 200])
@pytest.mark.parametrize("num_pools", [2, 8])
def test_the_work_for_500_workers_of_each_role_is_bounded(monkeypatch, num_hosts, num_pools):
    most = 20_000
    monkeypatch.setattr(assignment, "MAX_STEPS", most)
    pools = [f"{role}-{i}" for i in range(num_pools // 2) for role in ("prefill", "decode")]
    rooms = gpus(*[1000] * num_hosts)
    rooms = [replace(each, free={**each.free, **dict.fromkeys(pools, 300.0)}) for each in rooms]
    ids = range(1000 // num_pools)
    asked = [
        Wish(
            role=role_of(each),
            needs={"GPU": 1.0, each: 1.0},
            worker_ids=[f"{each}-{i}" for i in ids],
        )
        for each in pools
    ]

    with lines_executed(assignment, at_most=8 * most):
        found = assign(rooms, asked)

    num_placed, num_pairs = score(rooms, asked, found)
    assert num_placed == 1000
    assert num_pairs > 0.7 * 500 * 500 / num_hosts


@contextmanager
def lines_executed(module, at_most):
    """Fail once more lines of a module have been executed."""
    num_left = at_most

    def trace(frame, event, _):
        nonlocal num_left
        if frame.f_code.co_filename != module.__file__:
            return None
        num_left -= event == "line"
        assert num_left > 0, f"more than {at_most} lines were executed"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)


AMOUNTS = st.sampled_from([0.0, 0.5, 1.0, 2.0])
NEEDS = st.fixed_dictionaries({"GPU": AMOUNTS}, optional={"disk": AMOUNTS})
ROOMS = st.lists(
    st.tuples(
        st.fixed_dictionaries(
            {"GPU": st.sampled_from([0.0, 1.0, 2.0, 3.0])}, optional={"disk": AMOUNTS}
        ),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=3,
)
WISHES = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode"]), NEEDS, st.integers(0, 3)), max_size=3
).filter(lambda each: sum(count for _, _, count in each) <= 5)


def make(rooms, asked):
    return (
        [
            Room(node_id=f"h{index}", free=free, num_prefill=prefill, num_decode=decode)
            for index, (free, prefill, decode) in enumerate(rooms)
        ],
        [
            Wish(role=role, needs=needs, worker_ids=[f"{role}-{number}-{i}" for i in range(count)])
            for number, (role, needs, count) in enumerate(asked)
        ],
    )


def score(rooms, asked, found):
    """Return how many have a host and how many pairs share one; None: a host gives too much."""
    wish_of = {name: wish for wish in asked for name in wish.worker_ids}
    pairs = 0
    for room in rooms:
        there = [wish_of[name] for name, at in found.items() if at == room.node_id]
        used = {name for wish in there for name in wish.needs}
        if any(sum(w.needs.get(n, 0) for w in there) > room.free.get(n, 0) for n in used):
            return None
        prefill = room.num_prefill + sum(wish.role == "prefill" for wish in there)
        decode = room.num_decode + sum(wish.role == "decode" for wish in there)
        pairs += prefill * decode
    return len(found), pairs


@settings(max_examples=300)
@given(rooms=ROOMS, asked=WISHES)
def test_no_other_choice_places_more_or_leaves_fewer_pairs_apart(rooms, asked):
    rooms, asked = make(rooms, asked)

    found = assign(rooms, asked)

    names = [name for wish in asked for name in wish.worker_ids]
    places = [None, *(room.node_id for room in rooms)]
    scores = (
        score(rooms, asked, {n: at for n, at in zip(names, each, strict=True) if at})
        for each in itertools.product(places, repeat=len(names))
    )
    assert set(found) <= set(names)
    assert score(rooms, asked, found) == max(each for each in scores if each)
    assert assign(rooms, asked) == found


@settings(max_examples=50)
@given(
    numbers=st.lists(st.integers(0, 8), max_size=40),
    prefill=st.integers(0, 60),
    decode=st.integers(0, 60),
)
def test_beyond_an_exact_search_no_host_gives_too_much_and_all_is_used(numbers, prefill, decode):
    rooms, asked = gpus(*numbers), wishes(prefill, decode)

    found = assign(rooms, asked)

    assert score(rooms, asked, found), "no host gives more than it has"
    assert len(found) == min(sum(numbers), prefill + decode)
