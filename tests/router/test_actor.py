"""The Ray actor of a router, without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from observability.serving_process import CLOSE_TIMEOUT_S
from router.actor import RouterActor
from router.errors import ControllerGone
from tests.support.virtual_time import run_virtual, wait_until


@pytest.mark.parametrize("how", ["at once", "with an error", "never"])
def test_a_router_that_restarts_ends_however_its_parts_stop(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    class Process:
        async def stop(self, grace_s: float) -> None:
            if how == "with an error":
                raise ZeroDivisionError
            if how == "never":
                await asyncio.Event().wait()

    async def main() -> None:
        actor: Any = RouterActor.__new__(RouterActor)
        actor._process, actor._ending = Process(), None
        await actor.restart(10.0)
        await wait_until(lambda: bool(codes), timeout_s=10.0 + CLOSE_TIMEOUT_S + 1.0)

    run_virtual(main())
    assert codes == [1]


def test_of_rays_error_about_the_controller_only_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def address() -> str:
        raise ray.exceptions.RayError(
            "\x1b[36mray::ControllerActor\x1b[39m (pid=7)\n  File ...\nno"
        )

    controller = SimpleNamespace(address=SimpleNamespace(remote=address))
    monkeypatch.setattr(ray, "get_actor", lambda name: controller)
    actor: Any = RouterActor.__new__(RouterActor)
    actor._controller_name = "controller"

    with pytest.raises(ControllerGone, match=r"^no address from it: no$"):
        asyncio.run(actor._find_controller())
