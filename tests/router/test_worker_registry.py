"""A registry that stops, whatever is told to it meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router import wire
from router.config import RouterConfig
from router.membership import WorkerMember
from router.prefix_index import PrefixIndex
from router.worker_registry import WorkerRegistry
from tests.support.memory_grpc import MemoryNetwork
from tests.support.virtual_time import run_virtual

MEMBER = WorkerMember(worker_id="decode-0", incarnation=1, address="d:1", pool="decode")


def run(scenario: Callable[[WorkerRegistry], Awaitable[None]]) -> None:
    """Run a scenario; afterwards no task may be left, nor have failed."""

    async def main() -> None:
        network = MemoryNetwork()
        registry = WorkerRegistry(
            config=RouterConfig(),
            connect_channel=lambda member: network.channel(member.address),
            index=PrefixIndex(max_pages=10),
            on_lost=lambda worker, reason: None,
        )
        await scenario(registry)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_members_that_are_told_while_a_registry_stops_are_not_followed() -> None:
    async def scenario(registry: WorkerRegistry) -> None:
        registry.set_members([MEMBER])
        await asyncio.sleep(1.0)
        stopping = asyncio.create_task(registry.stop())
        await asyncio.sleep(0)
        registry.set_members([MEMBER])
        await stopping

    run(scenario)


def test_a_former_member_may_be_lost_in_the_moment_in_which_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(registry: WorkerRegistry) -> None:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(wire, "get_info", lambda channel, timeout_s: answer)
        registry.set_members([MEMBER])
        await asyncio.sleep(1.0)
        registry.set_members([])  # it stays for as long as it lives
        following = registry.get("decode-0").task
        answer.set_exception(OSError("its connection broke"))
        await registry.stop()
        assert following is not None
        await following

    run(scenario)
