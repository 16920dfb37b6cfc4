"""What the controller does with its workers; the actors are fakes that note their calls."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from cluster import controller as module
from cluster import host_looks
from cluster.config_file import load_config
from cluster.errors import ConfigError, PlacementError, StartError, Stopping
from cluster.membership import HEARD_S
from cluster.next_start import NextStart
from cluster.places import Place
from cluster.scaling import worker_ids
from tests.cluster.controlled_actors import NODES, World
from tests.support.certificates import Authority
from tests.support.waiting import until


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_routers_hear_of_a_drain_before_the_worker_does(world):
    async def main():
        await world.start()
        await world.controller.drain("decode-1", 7.0)
        assert world.told == [
            ("router-0", worker_names(), ["decode-1"]),
            ("applied",),
            ("drain", "decode-1", 7.0),
        ]
        world.told.clear()

        await world.controller.worker_left("decode-1", 1)
        assert world.told == [("router-0", worker_names(without="decode-1"), [])]

    asyncio.run(main())


def test_routers_hear_of_a_restart_before_the_worker_does_and_the_new_start_is_not_told_to_leave(
    world,
):
    async def main():
        await world.start()
        await world.controller.restart("decode-1", 7.0)
        assert world.told == [
            ("router-0", worker_names(), ["decode-1"]),
            ("applied",),
            ("restart", "decode-1", 7.0),
        ]
        world.told.clear()

        await world.announce("decode-1")
        assert world.told == [("restart", "decode-1", 7.0)], "Ray may have lost the call"
        await world.announce("decode-1", incarnation=2)
        await world.announce("decode-1", incarnation=2)
        assert world.told[1:] == [("router-0", worker_names(), [])]
        assert (await world.controller.facts()).workers.counts == {"prefill": 2, "decode": 2}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("decode-7", "allowed: prefill-0, prefill-1, decode-1"),
        ("decode-0", "which is leaving"),
        ("prefill-1", "which has not been heard from lately"),
    ],
)
def test_what_cannot_be_restarted_is_refused_and_nothing_has_changed(world, name, found):
    async def main():
        await world.start()
        await world.controller.drain("decode-0", 1.0)
        world.now += HEARD_S + 1
        await world.announce("decode-1")
        world.told.clear()
        with pytest.raises(ConfigError, match=found):
            await world.controller.restart(name, 7.0)
        assert world.told == []

    asyncio.run(main())


def test_workers_of_a_role_do_not_all_restart_at_once_nor_leave_while_the_others_do(world):
    async def main():
        await world.start()
        results = await asyncio.gather(
            *(world.controller.restart(name, 7.0) for name in ("decode-0", "decode-1")),
            return_exceptions=True,
        )
        assert results[0] == 1, "the start that ends"
        assert "decode-1', the last decode worker that serves now, while decode-0" in str(
            results[1]
        )
        with pytest.raises(ConfigError, match="decode-0', which has not been heard from lately"):
            await world.controller.restart("decode-0", 7.0)
        await world.announce("decode-0")  # it still ends
        with pytest.raises(ConfigError, match=r"found 'decode-1'; .* decode worker that serves"):
            await world.controller.drain("decode-1", 7.0)
        await world.controller.restart("prefill-0", 7.0)
        told = [each for each in world.told if each[0] in {"restart", "drain"}]
        assert told == [("restart", name, 7.0) for name in ("decode-0", "decode-0", "prefill-0")]

        await world.announce("decode-0", incarnation=2)
        await world.controller.restart("decode-1", 7.0)

    asyncio.run(main())


def test_a_worker_that_leaves_while_routers_hear_of_its_restart_is_told(world):
    async def main():
        await world.start()
        restarting = asyncio.create_task(world.controller.restart("decode-1", 7.0))
        await asyncio.sleep(0)
        world.ended.add("decode-1")
        with pytest.raises(StartError, match="decode-1 has left the cluster meanwhile"):
            await restarting

    asyncio.run(main())


def test_the_only_worker_of_a_role_may_restart(world):
    async def main():
        await world.start()
        await world.controller.drain("decode-0", 7.0)
        await world.controller.restart("decode-1", 7.0)
        assert world.told[-1] == ("restart", "decode-1", 7.0)

    asyncio.run(main())


@pytest.mark.parametrize("asks_clients", [False, True])
def test_a_restart_hears_which_processes_could_not_use_the_files_of_their_hosts(
    world, monkeypatch, tmp_path, asks_clients
):
    authority = Authority(tmp_path)
    tls = authority.settings(asks_clients=asks_clients)
    config = replace(world.deployment.config, tls=tls.inside, front_tls=tls.front)
    world.deployment = replace(world.deployment, config=config)
    nodes = [{**NODES[0], "Resources": {"node:h": 1.0}}, NODES[1]]
    nodes.append({**NODES[1], "NodeID": "n3"})  # no process is there
    monkeypatch.setattr(module, "hosts_now", lambda: (nodes, {}))
    found = {"n1": ("inside 1", "front"), "n2": ("", "")}
    asked = []

    async def next_start_of(node, settings, content, *, is_home):
        asked.append((node["NodeID"], settings, content, is_home))
        inside, front = found[node["NodeID"]]
        return NextStart(contract_version=8, wrong_files=inside, wrong_front_files=front)

    monkeypatch.setattr(host_looks, "_next_start_of", next_start_of)

    async def main():
        await world.start()
        other = Place(node_id="n2", resources={})
        world.controller._membership.place("decode-1", other)
        told = await world.controller.contract_versions()
        assert (told.running, told.to_start) == ((7,), {"10.0.0.1": 8, "10.0.0.2": 8})
        ours = Path(authority.file).read_bytes()
        assert asked == [("n1", tls, ours, True), ("n2", tls, ours, False)]
        on_n1 = dict.fromkeys(["prefill-0", "prefill-1", "decode-0"], ("inside 1",))
        both = ("inside 1", "front")
        fronts = {"router-0": both, "http-gateway": both if asks_clients else ("front",)}
        assert told.problems == on_n1 | fronts

        asked.clear()
        found.update({"n1": ("", ""), "n2": ("inside 2", "")})
        Path(tls.inside.key_file).unlink()  # of this host: there is nothing to compare with
        assert (await world.controller.contract_versions()).problems == {"decode-1": ("inside 2",)}
        assert [content for _, _, content, _ in asked] == [b"", b""]

    asyncio.run(main())


class Files:
    """Files of TLS of the hosts: `wrong` says what is wrong, by node_id; `asked` are in order."""

    def __init__(self, world, monkeypatch, folder):
        tls = Authority(folder).settings(asks_clients=False)
        config = replace(world.deployment.config, tls=tls.inside, front_tls=tls.front)
        world.deployment = replace(world.deployment, config=config)
        self.wrong = {}
        self.asked = []
        self.on_look = lambda: None
        monkeypatch.setattr(host_looks, "_next_start_of", self._next_start_of)

    async def _next_start_of(self, node, settings, content, *, is_home):
        self.asked.append(node["NodeID"])
        await asyncio.sleep(0)
        self.on_look()
        return NextStart(contract_version=8, wrong_files=self.wrong.get(node["NodeID"], ""))


REFUSED = "tls: on b, expired\n{} could not start with these files; nothing has changed; mend"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_worker_is_added_on_a_host_whose_files_it_could_not_use(monkeypatch, tmp_path, device):
    world = World(monkeypatch, device=device)
    files = Files(world, monkeypatch, tmp_path)
    files.wrong["n2"] = "tls: on b, expired"

    async def main():
        await world.start()
        with pytest.raises(StartError, match=REFUSED.format("decode-2")):
            await world.controller.scale({"prefill": 1, "decode": 3}, 1.0)
        assert world.told == []
        # A GPU is free on n2 alone; without GPUs, Ray starts workers on any host.
        assert files.asked == (["n2"] if device == "cuda" else ["n1", "n2"])

        files.asked.clear()
        await world.controller.scale({"prefill": 1}, 1.0)
        assert (world.told[-1], files.asked) == (("drain", "prefill-1", 1.0), [])

        files.wrong.clear()
        await world.controller.scale({"decode": 3}, 1.0)
        assert world.placed.keys() == {"decode-2"}

    asyncio.run(main())


def test_no_worker_moves_on_a_host_whose_files_its_successor_could_not_use(
    monkeypatch, tmp_path, world
):
    files = Files(world, monkeypatch, tmp_path)
    files.wrong = {"n1": "tls: on b, expired", "n2": "nobody is there"}

    async def main():
        await world.start()
        with pytest.raises(StartError, match=REFUSED.format("prefill-2")):
            await world.controller.move("decode-1", "prefill", 1.0)
        assert (world.told, files.asked) == ([], ["n1"])

        del files.wrong["n1"]
        assert await world.controller.move("decode-1", "prefill", 1.0) == ("prefill-2",) * 2

    asyncio.run(main())


@pytest.mark.parametrize("meanwhile", ["another host is chosen", "the cluster stops"])
def test_what_changes_while_hosts_look_at_their_files_counts(monkeypatch, tmp_path, meanwhile):
    world = World(monkeypatch, device="cuda")
    world.names.remove("decode-1")
    files = Files(world, monkeypatch, tmp_path)

    def change():
        if meanwhile == "the cluster stops":
            world.controller._is_closed = True
        else:
            world.available = {"n1": {"GPU": 1.0}, "n2": {}}

    files.on_look = change

    async def main():
        await world.start()
        if meanwhile == "the cluster stops":
            with pytest.raises(Stopping):
                await world.controller.scale({"decode": 2}, 1.0)
            assert world.told == []
        else:
            await world.controller.scale({"decode": 2}, 1.0)
            assert files.asked == ["n2", "n1"]
            assert [each.node_id for each in world.placed.values()] == ["n1"]

    asyncio.run(main())


def worker_names(without=""):
    return [each for each in sorted(worker_ids({"prefill": 2, "decode": 2})) if each != without]


def test_workers_of_a_host_that_goes_end_there_also_the_last_of_a_role_and_may_come_back(
    world, monkeypatch
):
    """What loads serves nothing and ends at once; what leaves already leaves; others stay."""

    async def main():
        await world.start()
        world.names += ["decode-2", "decode-3"]  # never heard of
        await world.controller.drain("decode-1", 7.0)
        world.told.clear()
        world.on_host["n1"] = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
        names = await world.controller.evacuate("n1", 5.0)

        assert sorted(names) == world.on_host["n1"][2:] + world.on_host["n1"][:2]
        assert world.told == [
            ("close", "n1"),
            ("router-0", worker_names(), worker_names()),
            ("applied",),
            ("restart", "decode-0", 5.0),
            ("kill", "decode-2"),
            ("restart", "prefill-0", 5.0),
            ("restart", "prefill-1", 5.0),
        ]
        await world.announce("decode-0", incarnation=2)
        draining = [each for each in worker_names() if each != "decode-0"]
        assert world.told[-1] == ("router-0", worker_names(), draining)
        world.told.clear()
        monkeypatch.setitem(NODES[1], "Resources", {"node:h": 1.0})
        with pytest.raises(ConfigError, match="found the host of the cluster's controller"):
            await world.controller.evacuate("n2", 5.0)
        await world.controller.close()
        with pytest.raises(Stopping):
            await world.controller.evacuate("n1", 5.0)
        assert world.told == []

    asyncio.run(main())


def test_a_controller_that_has_just_come_back_kills_no_worker_of_a_host_that_goes(world):
    async def main():
        await world.controller.__init__(world.deployment)
        world.on_host["n1"] = ["decode-0"]
        await world.controller.evacuate("n1", 5.0)
        assert world.told[-1] == ("restart", "decode-0", 5.0)

    asyncio.run(main())


@pytest.mark.parametrize("has_come_back", [False, True])
def test_a_worker_may_have_served_before_its_controller_came_back(world, has_come_back):
    """Then a start that fails is tried again; otherwise Ray would give it up for good."""

    async def main():
        world.context.was_current_actor_reconstructed = has_come_back
        await world.controller.__init__(world.deployment)
        assert await world.controller.was_ready("decode-0") is has_come_back
        world.now += 2 * HEARD_S
        assert not await world.controller.was_ready("decode-0")
        await world.announce("decode-0")
        assert await world.controller.was_ready("decode-0")

    asyncio.run(main())


def test_a_worker_that_ray_has_given_up_is_placed_again(world, monkeypatch):
    """Not one that was dismissed or forgotten, loads for the first time, or may still live."""
    monkeypatch.setattr(module, "REPLACE_PERIOD_S", 0.001)

    async def main():
        await world.start()
        await world.controller.drain("decode-1", 7.0)
        await world.controller.forget(["prefill-1"])
        world.told.clear()
        world.names = ["router-0"]
        await asyncio.sleep(0.05)
        assert world.told == []  # all were heard of just now
        world.now += 2 * HEARD_S
        await world.announce("prefill-0")
        while ("place", "decode-0") not in world.told:
            await asyncio.sleep(0.001)
        assert set(world.placed) == {"decode-0"}
        world.names.append("decode-0")
        world.now += 2 * HEARD_S
        while ("place", "prefill-0") not in world.told:
            await asyncio.sleep(0.001)
        world.names.append("prefill-0")
        await world.controller.close()
        await asyncio.sleep(0.05)
        assert [each for each in world.told if each[0] == "place"] == [
            ("place", "decode-0"),
            ("place", "prefill-0"),
        ]

    asyncio.run(main())


def test_where_no_worker_is_missing_the_loop_never_waits_for_ray(world, monkeypatch):
    """Ray answers late while its head is away; routers must not lose the controller, too."""
    monkeypatch.setattr(module, "REPLACE_PERIOD_S", 0.001)
    asked_in = set()
    monkeypatch.setattr(
        ray.util, "list_named_actors", lambda: asked_in.add(threading.get_ident()) or world.names
    )

    async def main():
        await world.start()
        while not asked_in:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await world.controller.close()

    asyncio.run(main())
    assert threading.get_ident() not in asked_in


def test_two_callers_cannot_both_let_the_last_worker_of_a_pool_go(world):
    async def main():
        await world.start()
        results = await asyncio.gather(
            *(world.controller.drain(name, 1.0) for name in ("decode-0", "decode-1")),
            return_exceptions=True,
        )

        assert results[0] is None
        assert isinstance(results[1], ConfigError)
        assert [each for each in world.told if each[0] == "drain"] == [("drain", "decode-0", 1.0)]

    asyncio.run(main())


def test_a_dismissed_worker_that_comes_back_is_told_again_also_by_a_new_controller(world):
    async def main():
        await world.start()
        await world.controller.drain("decode-1", 7.0)
        world.told.clear()
        await world.announce("decode-1", incarnation=2)
        assert ("drain", "decode-1", 7.0) in world.told

        await world.start()  # a new controller, which knows nothing
        await world.announce("decode-1", incarnation=2, is_leaving=True)
        assert world.told == [("router-0", worker_names(), ["decode-1"])]
        await world.announce("decode-1", incarnation=3)
        assert world.told[-1] == ("drain", "decode-1", 0.0)

    asyncio.run(main())


def test_scaling_places_new_workers_and_lets_others_go_and_what_still_loads_is_ended(world):
    async def main():
        await world.start()
        actors, plan = await world.controller.scale({"prefill": 1, "decode": 3}, 5.0)
        world.names.append("decode-2")
        assert (actors, plan.drains) == ({"decode-2": "decode-2"}, ("prefill-1",))
        assert world.told[0] == ("place", "decode-2")
        assert world.told[-1] == ("drain", "prefill-1", 5.0)

        await world.controller.scale({"decode": 2}, 5.0)
        assert world.told[-1] == ("kill", "decode-2"), "nobody has heard of it, so nothing runs"

    asyncio.run(main())


def test_scaling_lets_go_whoever_is_lost_and_the_others_serve_on(world):
    async def main():
        await world.start()
        world.now += HEARD_S + 1
        for name in worker_names(without="decode-0"):
            await world.announce(name)
        _, plan = await world.controller.scale({"decode": 1}, 5.0)
        assert plan.drains == ("decode-0",)
        assert ("kill", "decode-0") in world.told
        assert not any(each[0] == "drain" for each in world.told)

    asyncio.run(main())


def test_workers_that_the_host_cannot_hold_are_refused_before_any_is_placed_or_leaves(world):
    async def main():
        await world.start()
        world.most_workers = 4
        with pytest.raises(PlacementError, match=r"too many: .*decode', 4.*prefill', 1"):
            await world.controller.scale({"prefill": 1, "decode": 4}, 1.0)
        world.most_workers = 3
        with pytest.raises(PlacementError, match=r"too many: .*decode', 3.*prefill', 1"):
            await world.controller.move("prefill-1", "decode", 1.0)
        assert world.told == []
        await world.controller.scale({"decode": 1}, 1.0)  # fewer are never too many

    asyncio.run(main())


def test_what_workers_have_loaded_counts_until_they_leave(world):
    async def main():
        await world.start()
        names = [*worker_names(), "decode-2"]
        world.names.append("decode-2")  # of which nobody has heard
        for name in names:
            await world.controller.report_loaded(name, 1, 2)
        assert await world.controller.loaded() == (5, 10)

        await world.controller.scale({"decode": 2}, 5.0)  # ends the one that loads
        assert await world.controller.loaded() == (4, 8)
        await world.controller.drain("decode-1", 5.0)
        await world.controller.worker_left("decode-1", 1)
        assert await world.controller.loaded() == (3, 6)
        assert world.controller._loaded.keys() == {*worker_names(without="decode-1")}

    asyncio.run(main())


def test_nobody_is_let_go_for_one_that_is_not_heard_of(world):
    async def main():
        await world.start()
        world.now += HEARD_S + 1
        await world.announce("decode-0")

        with pytest.raises(ConfigError, match=r"found 'decode-0'; .*heard from there lately"):
            await world.controller.drain("decode-0", 1.0)
        await world.controller.drain("decode-1", 1.0)

    asyncio.run(main())


def test_one_that_dies_again_and_again_is_ended_and_one_that_drains_is_not_ended_by_a_second_word(
    world,
):
    async def main():
        await world.start()
        await world.controller.drain("prefill-0", 60.0)
        world.now += HEARD_S + 1  # of prefill-1 nothing has been heard, but it is Ray's
        for name in ("decode-0", "decode-1"):
            await world.announce(name)
        await world.announce("prefill-0", is_leaving=True)

        await world.controller.drain("prefill-0", 60.0)
        assert world.told[-1] == ("drain", "prefill-0", 60.0)

        world.names.append("prefill-2")
        await world.announce("prefill-2")
        await world.controller.drain("prefill-1", 60.0)
        assert world.told[-2] == ("kill", "prefill-1")
        assert "prefill-1" not in world.told[-1][1], "routers hear that it is gone"

    asyncio.run(main())


def test_one_that_has_ended_when_it_is_told_to_leave_hands_that_to_no_successor(world):
    async def main():
        await world.start()
        world.ended.add("decode-1")
        await world.controller.drain("decode-1", 7.0)
        assert world.told[-1] == ("router-0", worker_names(without="decode-1"), [])
        world.names.remove("decode-1")
        world.ended.clear()

        await world.controller.scale({"decode": 2}, 5.0)
        world.names.append("decode-1")
        world.told.clear()
        await world.announce("decode-1", incarnation=2)
        assert world.told == [("router-0", worker_names(), [])]

    asyncio.run(main())


def test_one_that_has_left_does_not_count_though_ray_still_lists_it(world):
    async def main():
        await world.start()
        await world.controller.drain("decode-1", 7.0)
        await world.controller.worker_left("decode-1", 1)

        workers = (await world.controller.facts()).workers
        assert workers.counts == {"prefill": 2, "decode": 1}
        with pytest.raises(ConfigError, match="the last decode worker must stay"):
            await world.controller.drain("decode-0", 1.0)
        _, plan = await world.controller.scale({"decode": 2}, 5.0)
        assert plan.starts == ("decode-2",), "its name is taken"

        world.names.remove("decode-1")
        world.names.append("decode-2")
        _, plan = await world.controller.scale({"decode": 3}, 5.0)
        assert plan.starts == ("decode-1",)
        world.names.append("decode-1")
        assert (await world.controller.facts()).workers.counts == {"prefill": 2, "decode": 3}

    asyncio.run(main())


def test_one_that_was_ended_while_it_loads_does_not_count_though_ray_still_lists_it(world):
    async def main():
        await world.start()
        await world.controller.scale({"decode": 3}, 5.0)
        world.names.append("decode-2")
        await world.controller.scale({"decode": 2}, 5.0)
        assert world.told[-1] == ("kill", "decode-2")

        assert (await world.controller.facts()).workers.counts == {"prefill": 2, "decode": 2}

    asyncio.run(main())


def test_workers_for_which_no_gpu_is_free_are_refused_before_any_is_placed(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        await world.start()
        with pytest.raises(
            PlacementError,
            match="no host has room for decode-3: each needs 1 GPU; add",
        ):
            await world.controller.scale({"decode": 4}, 1.0)
        assert world.told == []

    asyncio.run(main())


def test_a_new_worker_gets_the_host_of_those_that_it_talks_with(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        world.available = {"n1": {"GPU": 2.0}, "n2": {"GPU": 4.0}}
        world.names.remove("decode-1")
        await world.start()
        await world.controller.scale({"decode": 2}, 1.0)
        place = Place(node_id="n1", resources={"GPU": 1.0}, group="of decode-1")
        assert world.placed == {"decode-1": place}

        # Ray has not yet given decode-1 its GPU, and has only one more there.
        world.names.append("decode-1")
        await world.controller.scale({"decode": 4}, 1.0)
        assert [world.placed[f"decode-{n}"].node_id for n in (2, 3)] == ["n2", "n2"]

    asyncio.run(main())


def test_one_that_moves_leaves_its_place_to_one_of_the_other_pool(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        await world.start()
        world.groups["its"] = {"prefill-1"}

        assert await world.controller.move("prefill-1", "decode", 7.0) == ("decode-2", "decode-2")

        assert world.told == [
            ("place", "decode-2"),
            ("router-0", worker_names(), ["prefill-1"]),
            ("applied",),
            ("drain", "prefill-1", 7.0),
        ]
        place = Place(node_id="n1", resources={"GPU": 1.0}, group="its")
        assert world.placed == {"decode-2": place}
        world.names.append("decode-2")
        assert (await world.controller.facts()).workers.counts == {"prefill": 1, "decode": 3}
        with pytest.raises(ConfigError, match=r"found 'prefill-0'; .* the last prefill worker"):
            await world.controller.move("prefill-0", "decode", 7.0)

        await world.controller.worker_left("prefill-1", 1)
        world.names.remove("prefill-1")
        await world.announce("decode-2", incarnation=2)
        name, _ = await world.controller.move("decode-2", "prefill", 7.0)
        assert name == "prefill-1"
        assert world.placed["prefill-1"] == world.placed["decode-2"], "the same place again"

    asyncio.run(main())


def test_one_of_an_older_version_has_no_group_and_leaves_its_host_to_its_successor(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        await world.start()

        await world.controller.move("prefill-1", "decode", 7.0)

        assert world.placed == {"decode-2": Place(node_id="n1", resources={"GPU": 1.0})}
        assert world.groups == {}

    asyncio.run(main())


@pytest.fixture
def world_of_groups(monkeypatch):
    """A world whose workers have a GPU each, and whose controller looks again only if told."""
    monkeypatch.setattr(module, "REPLACE_PERIOD_S", 600.0)
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    world = World(monkeypatch, device="cuda")
    world.context.was_current_actor_reconstructed = True
    world.groups = {f"of {name}": {name} for name in worker_names()}
    return world


def test_groups_go_as_soon_as_their_worker_has_ended_unless_another_one_has_them(world_of_groups):
    world = world_of_groups

    async def main():
        await world.start()
        await world.controller.move("prefill-1", "decode", 7.0)
        world.names.append("decode-2")
        await world.controller.drain("decode-1", 7.0)
        for name in ("prefill-1", "decode-1"):
            await world.controller.worker_left(name, 1)
        await asyncio.sleep(0.02)
        assert len(world.groups) == 4, "their actors have not ended yet"

        world.names = [each for each in world.names if each not in {"prefill-1", "decode-1"}]
        await until(lambda: "of decode-1" not in world.groups)
        assert set(world.groups) == {"of prefill-0", "of decode-0", "of prefill-1"}

        world.names.remove("decode-2")  # a command has ended it
        await world.controller.forget(["decode-2"])
        await until(lambda: set(world.groups) == {"of prefill-0", "of decode-0"})
        assert world.told.count(("place", "decode-2")) == 1

    asyncio.run(main())


def test_a_group_whose_worker_is_just_being_placed_stays(world_of_groups, monkeypatch):
    world = world_of_groups
    looks = []

    def look():
        """Ask Ray when the group exists, and not yet the worker."""
        looks.append(world._look_at_groups())
        if len(looks) == 1:
            world.names.append("decode-2")
        return looks[-1]

    world.groups["of decode-2"] = {"decode-2"}
    monkeypatch.setattr(module, "look_at_groups", look)

    async def main():
        await world.start()
        await world.controller.forget([])
        await world.controller.worker_left("decode-7", 1)
        await until(lambda: len(looks) >= 2)
        await asyncio.sleep(0.02)
        assert looks[0].unused == {"of decode-2"}
        assert "of decode-2" in world.groups

    asyncio.run(main())


def test_before_the_launcher_has_placed_all_workers_no_group_goes(world_of_groups, monkeypatch):
    world = world_of_groups
    world.context.was_current_actor_reconstructed = False
    monkeypatch.setattr(module, "REPLACE_PERIOD_S", 0.001)
    for each in ("place_router", "place_gateway"):
        monkeypatch.setattr(module, each, lambda *_: None)
    world.groups["new"] = set()

    async def main():
        await world.start()
        await asyncio.sleep(0.02)
        assert "new" in world.groups
        await world.controller.deploy()
        await until(lambda: "new" not in world.groups)
        assert set(world.groups) == {f"of {name}" for name in worker_names()}

    asyncio.run(main())


@pytest.mark.parametrize("is_stuck", [True, False], ids=["stuck", "behind its successor"])
def test_workers_that_wait_in_vain_in_their_group_are_placed_anew_and_leaving_ones_end(
    world_of_groups, monkeypatch, is_stuck
):
    world = world_of_groups

    def kill(actor, no_restart):
        assert no_restart
        world.names.remove(actor.name)
        world.unready -= {actor.name}
        world.stuck -= {actor.name}

    async def main():
        monkeypatch.setattr(ray, "kill", kill)
        await world.start()
        world.available = {"n2": {"GPU": 4.0}}  # Ray has closed n1
        await world.controller.drain("prefill-1", 7.0)
        world.unready = frozenset({"prefill-1", "decode-1", "decode-0"})
        world.stuck = frozenset({"prefill-1", "decode-1"} if is_stuck else {"decode-1"})
        await world.controller.worker_left("decode-7", 1)
        await until(lambda: "decode-1" in world.placed)

        assert world.placed == {
            "decode-1": Place(node_id="n2", resources={"GPU": 1.0}, group="of decode-1")
        }
        assert (await world.controller.facts()).workers.counts == {"prefill": 1, "decode": 1}
        assert "decode-0" in world.names, "it loads"
        await until(lambda: "of prefill-1" not in world.groups)

    asyncio.run(main())


def test_one_whose_host_the_other_pool_cannot_use_stays(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        options = {
            "ray_address": "auto",
            "pools.small.role": "decode",
            "pools.small.accelerator_type": "L4",
        }
        config = load_config(None, {"model": "/models/tiny", **options})
        world.deployment = replace(world.deployment, config=config)
        await world.start()
        lacks = r"on a \(10.0.0.1\), which does not have accelerator_type:L4"
        with pytest.raises(PlacementError, match=lacks):
            await world.controller.move("decode-1", "decode-small", 7.0)
        assert world.told == []

    asyncio.run(main())


def test_where_a_worker_is_counts_until_it_has_left(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        await world.start()
        await world.controller.drain("prefill-1", 1.0)
        await world.controller.worker_left("prefill-1", 1)
        world.names.remove("prefill-1")
        world.available = {"n1": {"GPU": 1.0}, "n2": {}}
        await world.controller.scale({"decode": 3}, 1.0)
        assert world.placed["decode-2"].node_id == "n1"

    asyncio.run(main())


def test_a_worker_that_did_not_start_leaves_its_place_to_the_next_attempt(monkeypatch):
    """Whoever asked for it has had Ray end it, and told nobody."""

    async def main():
        world = World(monkeypatch, device="cuda")
        world.available = {"n1": {}, "n2": {"GPU": 4.0}}
        await world.start()
        for _ in range(3):  # Ray lists none of them any more
            await world.controller.scale({"decode": 6}, 1.0)
            assert [world.placed[f"decode-{n}"].node_id for n in range(2, 6)] == ["n2"] * 4

    asyncio.run(main())


def test_workers_wait_for_hosts_that_may_join_later(monkeypatch):
    async def main():
        world = World(monkeypatch, device="cuda")
        options = {"device": "cuda", "ray_address": "auto", "pool_resources": True}
        config = load_config(None, {"model": "/models/tiny", "prefill": 2, "decode": 2, **options})
        world.deployment = replace(world.deployment, config=config)
        await world.start()
        _, plan = await world.controller.scale({"decode": 4}, 1.0)
        assert world.told[:2] == [("place", "decode-2"), ("place", "decode-3")]
        assert plan.waiting == (
            "no host has room for decode-2, decode-3: each needs 1 GPU and 1 pagewire-decode; "
            "waiting for a host that has"
        )

    asyncio.run(main())


def test_a_cluster_that_stops_changes_no_more(world):
    async def main():
        await world.start()
        assert not (await world.controller.facts()).is_stopping
        await world.controller.close()
        assert (await world.controller.facts()).is_stopping
        for change in (
            world.controller.deploy(),
            world.controller.scale({"decode": 3}, 1.0),
            world.controller.drain("decode-1", 1.0),
            world.controller.move("decode-1", "prefill", 1.0),
            world.controller.succeed_gateway(1.0),
        ):
            with pytest.raises(Stopping, match="run `pagewire down` again"):
                await change
        assert world.told == []

    asyncio.run(main())


def test_who_places_an_actor_imports_nothing_of_what_it_serves_with():
    code = "import sys, cluster.controller; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    serving = {"router.process", "http_gateway.server", "worker.process", "worker.host"}

    assert "worker.actor" in found.stdout.split()
    assert (
        set(found.stdout.split()) & (serving | {"numpy", "torch", "jinja2", "tokenizers"}) == set()
    )
