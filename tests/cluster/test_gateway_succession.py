"""How the controller replaces the HTTP gateway; the gateways are fakes that note their calls."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from cluster import controller as module
from cluster import gateway_succession
from cluster.errors import StartError
from tests.cluster.controlled_actors import World


class Gateways:
    """The gateways beside the workers of a world; `told` are the calls that they got, in order."""

    def __init__(self, world, monkeypatch):
        world.names += ["http-gateway-10", "http-gateway-9"]  # the older one should have ended
        self.controller = world.controller
        self.told = []
        self.ready = {}  # of those that were placed
        self.ended = {}  # of those that retire
        monkeypatch.setattr(gateway_succession, "place_gateway", self._place)
        monkeypatch.setattr(ray, "get_actor", self._actor)
        monkeypatch.setattr(ray, "kill", lambda actor, no_restart: self._tell("kill", actor.name))

    def _tell(self, *call):
        self.told.append(call)

    def _place(self, deployment, name, *, predecessor):
        self._tell("place", name, predecessor)
        self.ready[name] = asyncio.get_running_loop().create_future()
        return self._actor(name)

    def _actor(self, name):
        def retire(grace_s):
            self._tell("retire", name, grace_s)
            self.ended[name] = asyncio.get_running_loop().create_future()
            return self.ended[name]

        return SimpleNamespace(
            name=name,
            retire=SimpleNamespace(remote=retire),
            wait_ready=SimpleNamespace(remote=lambda: self.ready[name]),
        )


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def gateways(world, monkeypatch):
    return Gateways(world, monkeypatch)


def test_those_before_it_retire_when_a_gateway_serves_and_ray_starts_none_of_them_again(
    world, gateways, monkeypatch
):
    monkeypatch.setattr(gateway_succession, "CLOSE_TIMEOUT_S", 0.05)

    async def main():
        await world.controller.__init__(world.deployment)
        restart = asyncio.create_task(gateways.controller.succeed_gateway(0.0))
        await asyncio.sleep(0.01)
        with pytest.raises(StartError, match="http-gateway is being restarted by another command"):
            await gateways.controller.succeed_gateway(0.0)
        assert gateways.told == [("place", "http-gateway-11", "http-gateway-10")]

        gateways.ready["http-gateway-11"].set_result("h:1")
        await restart
        await asyncio.sleep(0.01)
        old = ["http-gateway-9", "http-gateway-10"]
        assert gateways.told[1:] == [("retire", name, 0.0) for name in old]

        gateways.ended["http-gateway-10"].set_exception(
            ray.exceptions.ActorUnavailableError("x", None)
        )
        await asyncio.sleep(0.01)
        assert gateways.told[3:] == [("kill", "http-gateway-10")], "it crashed"
        await asyncio.sleep(0.1)
        assert gateways.told[4:] == [("kill", "http-gateway-9")], "it did not end"

    asyncio.run(main())


def test_another_restart_leaves_one_that_retires_the_grace_it_has(world, gateways):
    world.names.remove("http-gateway-9")

    async def main():
        await world.controller.__init__(world.deployment)
        for number, grace_s in ((11, 60.0), (12, 1.0)):
            restart = asyncio.create_task(gateways.controller.succeed_gateway(grace_s))
            await asyncio.sleep(0.01)
            gateways.ready[f"http-gateway-{number}"].set_result("h:1")
            await restart
            world.names.append(f"http-gateway-{number}")
            await asyncio.sleep(0.01)
        retired = [call for call in gateways.told if call[0] == "retire"]
        assert retired == [("retire", "http-gateway-10", 60.0), ("retire", "http-gateway-11", 1.0)]

    asyncio.run(main())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_gateway_that_does_not_start_is_ended_and_the_running_one_stays(world, gateways, is_late):
    config = replace(world.deployment.config, start_timeout_s=0.05)
    world.deployment = replace(world.deployment, config=config)
    told = "not ready after 0.05 s" if is_late else "the listener did not come"
    told = f"another http-gateway did not start: {told}; the running one is unchanged"

    async def main():
        await world.controller.__init__(world.deployment)
        for number in (1, 2):  # the command may be given again
            restart = asyncio.create_task(gateways.controller.succeed_gateway(7.0))
            await asyncio.sleep(0.01)
            if not is_late:
                error = ray.exceptions.RayError(
                    "http_gateway.handover.NotPassedOn: the listener did not come"
                )
                gateways.ready["http-gateway-11"].set_exception(error)
            with pytest.raises(StartError, match=told):
                await restart
            calls = [("place", "http-gateway-11", "http-gateway-10"), ("kill", "http-gateway-11")]
            assert gateways.told == number * calls

    asyncio.run(main())


def test_a_gateway_that_has_ended_meanwhile_is_told(world, gateways):
    world.names[:] = [each for each in world.names if not each.startswith("http-gateway")]

    async def main():
        await world.controller.__init__(world.deployment)
        with pytest.raises(StartError, match=r"^http-gateway has ended meanwhile"):
            await gateways.controller.succeed_gateway(0.0)

    asyncio.run(main())
    assert gateways.told == []


def test_a_controller_has_those_end_that_an_earlier_one_has_replaced(world, gateways, monkeypatch):
    monkeypatch.setattr(module, "REPLACE_PERIOD_S", 0.001)

    async def main():
        present = gateways.ready["http-gateway-10"] = asyncio.get_running_loop().create_future()
        present.set_exception(ray.exceptions.ActorUnavailableError("it starts", None))
        await world.controller.__init__(world.deployment)
        await asyncio.sleep(0.05)
        assert gateways.told == [], "nobody else would serve"

        present = gateways.ready["http-gateway-10"] = asyncio.get_running_loop().create_future()
        present.set_result("h:1")
        await asyncio.sleep(0.05)
        grace_s = world.deployment.config.stop_grace_s
        assert gateways.told == [("retire", "http-gateway-9", grace_s)]

        gateways.ended["http-gateway-9"].set_result(None)
        world.names.remove("http-gateway-9")
        await asyncio.sleep(0.05)
        assert gateways.told[1:] == [("kill", "http-gateway-9")]

    asyncio.run(main())
