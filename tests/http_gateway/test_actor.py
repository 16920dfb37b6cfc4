"""The Ray actor of a gateway, without Ray."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.config_file import load_config
from cluster.deployment import Deployment
from cluster.placement import place_gateway
from credentials.secret import ClusterSecret
from http_gateway.actor import FIND_TIMEOUT_S, GatewayActor
from observability.tracing import begin_trace
from pagewire import UnavailableError
from pagewire.protos.trace_context import NO_TRACE
from tests.support.virtual_time import run_virtual

LOST = ray.exceptions.ActorUnavailableError("task 7 may or may not have been executed", None)


def find(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Awaitable[str]]) -> Any:
    """Let a gateway look for its router, whose actor answers so; return what it finds."""
    router = SimpleNamespace(wait_ready=SimpleNamespace(remote=answer))
    monkeypatch.setattr(ray, "get_actor", lambda _: router)
    actor: Any = GatewayActor.__new__(GatewayActor)
    actor._router_name = "router-0"
    return actor._find_routers()


def cluster_at(port: int, **options: str) -> Deployment:
    return Deployment(
        config=load_config(None, {"http_port": port, **options}),
        device="cpu",
        secret=ClusterSecret.generate(),
        home_resource="node:h",
        environment={},
        visible_gpus=None,
    )


def test_a_router_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def answer() -> str:
            if loop.time() < 3.0:
                raise LOST
            return "127.0.0.1:7"

        assert await find(monkeypatch, answer) == ["127.0.0.1:7"]

    run_virtual(main())


@pytest.mark.parametrize("how", ["restarts", "hangs", "has ended"])
def test_one_that_does_not_come_back_is_told_of_in_time_without_words_of_ray(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def answer() -> str:
        if how == "has ended":
            raise ray.exceptions.ActorDiedError
        if how == "hangs":
            await asyncio.Event().wait()
        raise LOST

    async def main() -> None:
        with pytest.raises(UnavailableError) as told:
            await find(monkeypatch, answer)
        is_over = how == "has ended"
        assert str(told.value) == (
            "the router cannot be found: ActorDiedError"
            if is_over
            else "the router has not answered within 5 s; it may be starting"
        )
        assert asyncio.get_running_loop().time() == pytest.approx(0 if is_over else FIND_TIMEOUT_S)

    run_virtual(main())


def test_a_gateway_in_a_cluster_traces_as_the_cluster_does_while_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.placement.place", lambda actor, name, options, start: start)
    deployment = cluster_at(0, **{"tracing.endpoint": "http://127.0.0.1:9/v1/traces"})

    def is_traced() -> bool:
        return begin_trace("POST /v1/completions", NO_TRACE).is_traced

    async def main() -> None:
        actor: Any = GatewayActor.__new__(GatewayActor)
        await actor.__init__(place_gateway(deployment))
        assert is_traced()
        await actor.stop(0.0)
        assert not is_traced()

    asyncio.run(main())


async def health(address: str) -> None:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 ")
    writer.close()


@pytest.mark.parametrize("has_come_back", [False, True])
def test_a_gateway_takes_over_from_its_predecessor_and_when_it_has_died_binds_the_port_itself(
    monkeypatch: pytest.MonkeyPatch, has_come_back: bool
) -> None:
    monkeypatch.setattr("cluster.placement.place", lambda actor, name, options, start: start)
    context = SimpleNamespace(was_current_actor_reconstructed=has_come_back)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    asked: list[str] = []

    async def main() -> None:
        old: Any = GatewayActor.__new__(GatewayActor)
        await old.__init__(place_gateway(cluster_at(0)))
        address = await old.wait_ready()
        await health(address)

        def get_actor(name: str) -> Any:
            asked.append(name)
            return SimpleNamespace(hand_over=SimpleNamespace(remote=old.hand_over))

        monkeypatch.setattr(ray, "get_actor", get_actor)
        new: Any = GatewayActor.__new__(GatewayActor)
        deployment = cluster_at(int(address.rpartition(":")[2]))
        if has_come_back:
            await old.retire(0.0)
        await new.__init__(
            place_gateway(deployment, "http-gateway-1", predecessor="http-gateway-0")
        )
        await old.retire(0.0)
        assert await new.wait_ready() == address
        await health(address)
        await new.stop(0.0)

    asyncio.run(main())
    assert asked == ([] if has_come_back else ["http-gateway-0"])


def test_a_gateway_that_cannot_take_over_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.placement.place", lambda actor, name, options, start: start)
    context = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    def get_actor(name: str) -> Any:
        raise ValueError(f"there is no {name}")

    monkeypatch.setattr(ray, "get_actor", get_actor)
    actor: Any = GatewayActor.__new__(GatewayActor)
    start = place_gateway(cluster_at(0), "http-gateway-1", predecessor="http-gateway-0")
    with pytest.raises(ValueError, match="there is no http-gateway-0"):
        asyncio.run(actor.__init__(start))
