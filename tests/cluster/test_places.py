"""Which host of Ray a new worker gets, and what is refused: Ray's answers are given."""

import pytest

from cluster.errors import PlacementError
from cluster.places import Place, check_room, choose_places, told_waiting


def node(name, **resources):
    return {
        "NodeID": name,
        "NodeManagerAddress": f"10.0.0.{name[1:]}",
        "Alive": True,
        "Resources": resources,
    }


NODES = [node("n2", GPU=2.0), node("n1", GPU=2.0)]
ALL_FREE = {"n1": {"GPU": 2.0}, "n2": {"GPU": 2.0}}
GPU = {"GPU": 1.0}


def test_the_hosts_come_in_the_order_of_their_addresses():
    found = choose_places({"prefill-0": GPU, "decode-0": GPU}, {}, NODES, ALL_FREE)

    assert found == {name: Place(node_id="n1", resources=GPU) for name in ("prefill-0", "decode-0")}


@pytest.mark.parametrize(
    ("taken", "available", "expected"),
    [
        ({}, {"n1": {}, "n2": {"GPU": 1.0}}, "n2"),  # somebody else has n1
        ({"decode-7": Place(node_id="n1", resources={"GPU": 2.0})}, ALL_FREE, "n2"),  # it waits
        ({"decode-7": Place(node_id="n2", resources=GPU)}, ALL_FREE, "n2"),  # it talks with that
        ({"decode-7": Place(node_id="gone", resources=GPU)}, ALL_FREE, "n1"),
        ({}, {}, ""),
    ],
)
def test_room_is_what_ray_has_left_without_what_is_promised(taken, available, expected):
    found = choose_places({"prefill-0": GPU}, taken, NODES, available)

    assert found == {"prefill-0": Place(node_id=expected, resources=GPU)}


def test_a_place_that_two_workers_have_while_one_moves_leaves_the_others_free():
    full = Place(node_id="n1", resources={"GPU": 2.0})
    taken = {"prefill-1": full, "decode-1": full}  # which waits until the other has left

    found = choose_places({"decode-2": GPU}, taken, NODES, {"n1": {}, "n2": {"GPU": 2.0}})

    assert found["decode-2"].node_id == "n2"
    assert choose_places({"decode-2": GPU}, taken, NODES[1:], {})["decode-2"].node_id == ""


def test_hosts_that_are_gone_have_no_room():
    gone = [each | {"Alive": False} for each in NODES]

    assert choose_places({"decode-0": GPU}, {}, gone, ALL_FREE)["decode-0"].node_id == ""


def test_workers_that_nothing_limits_are_left_to_ray():
    for needs in ({}, {"rack-a": 0.001}):
        assert choose_places({"decode-0": needs}, {}, NODES, ALL_FREE) == {
            "decode-0": Place(node_id="", resources=needs)
        }


def test_workers_without_room_are_refused_with_what_they_need():
    needs = {"GPU": 1.0, "pagewire-decode": 1.0}
    places = {
        "prefill-0": Place(node_id="n1", resources=GPU),
        "decode-0": Place(resources=needs),
        "decode-1": Place(resources={}),
    }

    with pytest.raises(PlacementError) as refusal:
        check_room(places)

    assert str(refusal.value) == (
        "no host has room for decode-0: each needs 1 GPU and 1 pagewire-decode; add hosts to the "
        "Ray cluster, or ask for fewer"
    )
    check_room({"decode-1": Place()})
    assert told_waiting(places) == (
        "no host has room for decode-0: each needs 1 GPU and 1 pagewire-decode; waiting for a host "
        "that has"
    )
    assert told_waiting({"prefill-0": places["prefill-0"], "decode-1": places["decode-1"]}) == ""
