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
from observability.serving_process import CLOSE_TIMEOUT_S
from observability.tracing import begin_trace
from pagewire import UnavailableError
from pagewire.protos.trace_context import NO_TRACE
from tests.support.virtual_time import run_virtual, wait_until

LOST = ray.exceptions.ActorUnavailableError("task 7 may or may not have been executed", None)


def find(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], Awaitable[str]]) -> Any:
    """Let a gateway look for its router, whose actor answers so; return what it finds."""
    router = SimpleNamespace(wait_ready=SimpleNamespace(remote=answer))
    monkeypatch.setattr(ray, "get_actor", lambda _: router)
    actor: Any = GatewayActor.__new__(GatewayActor)
    actor._router_name = "router-0"
    return actor._find_routers()


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
    endpoint = "http://127.0.0.1:9/v1/traces"
    deployment = Deployment(
        config=load_config(None, {"http_port": 0, "tracing.endpoint": endpoint}),
        device="cpu",
        secret=ClusterSecret.generate(),
        home_resource="node:h",
        environment={},
        visible_gpus=None,
    )

    def is_traced() -> bool:
        return begin_trace("POST /v1/completions", NO_TRACE).is_traced

    async def main() -> None:
        actor: Any = GatewayActor.__new__(GatewayActor)
        await actor.__init__(place_gateway(deployment))
        assert is_traced()
        await actor.stop(0.0)
        assert not is_traced()

    asyncio.run(main())


def test_a_gateway_that_restarts_ends_though_its_server_does_not_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    class Server:
        async def stop(self, grace_s: float) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        actor: Any = GatewayActor.__new__(GatewayActor)
        actor._server, actor._ending = Server(), None
        await actor.restart(10.0)
        await wait_until(lambda: bool(codes), timeout_s=10.0 + CLOSE_TIMEOUT_S + 1.0)

    run_virtual(main())
    assert codes == [1]
