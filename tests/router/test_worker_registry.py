"""A registry that is left by its workers or stops, whatever is told to it meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router import wire
from router.config import RouterConfig
from router.membership import WorkerMember
from router.prefix_index import PrefixIndex
from router.worker_registry import WorkerRegistry
from tests.router.scripted_worker import ScriptedWorker, running_router
from tests.support.memory_grpc import MemoryNetwork
from tests.support.virtual_time import run_virtual

MEMBER = WorkerMember(worker_id="decode-0", incarnation=1, address="d:1", pool="decode")


def run(scenario: Callable[[WorkerRegistry], Awaitable[None]]) -> None:
    """Run a scenario; afterwards no task may be left, nor have failed."""

    async def main() -> None:
        network = MemoryNetwork()
        registry = WorkerRegistry(
            config=RouterConfig(),
            tokenizer_digest="",
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
        assert following.cancelled()

    run(scenario)


def test_a_start_that_is_replaced_in_the_moment_of_a_heartbeat_stays_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = wire.watch

    async def main() -> None:
        is_due = False

        def watch_until_replaced(channel: Any) -> Any:
            call = watch(channel)

            async def read() -> Any:
                message = await call.read()
                if is_due:
                    reading = asyncio.current_task()
                    assert reading
                    reading.add_done_callback(lambda _: registry.set_members([replacing]))
                return message

            return SimpleNamespace(read=read, cancel=call.cancel)

        monkeypatch.setattr(wire, "watch", watch_until_replaced)
        async with running_router(ScriptedWorker("decode-0")) as tested:
            registry = tested.router.registry
            replacing = ScriptedWorker("decode-0", incarnation=2).member
            is_due = True
            await asyncio.sleep(1.0)
            states = {each.member.incarnation: each.state for each in registry.known_workers()}
            assert states == {1: "DEAD", 2: "DEAD"}

    run_virtual(main())
