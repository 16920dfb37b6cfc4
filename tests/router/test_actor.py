"""The Ray actor of a router, without Ray."""

import asyncio
from typing import Any

import pytest

from observability.serving_process import CLOSE_TIMEOUT_S
from router.actor import RouterActor
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
