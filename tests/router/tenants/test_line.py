"""Work before a request's turn: one tenant's flood neither delays others nor takes all the room."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from grammars.constraint import Constraint
from pagewire.protos import inference_pb2
from pagewire.routers import token_metadata
from protos.shares import Room
from router import child_pool, off_loop
from router.child_pool import ChildPool
from router.constraint_check import ChildChecker
from router.errors import Overloaded
from router.off_loop import MAX_RUNNING, OffLoop
from router.request import ServedModel
from router.tenants.line import Line
from router.tenants.tenant import NO_TENANT, TenantRules
from tests.router.fake_children import children_that_answer, make_pool
from tests.router.scripted_worker import ScriptedWorker, running_router
from tests.router.slow_threads import LARGE, Threads
from tests.router.tenants.known import rules, tenants
from tests.support.grammar_cases import choice
from tests.support.virtual_time import run_virtual

FLOOD, OTHER = rules("flood"), rules("other")


def test_tenants_take_turns_and_callers_of_one_tenant_are_served_in_order() -> None:
    async def scenario() -> None:
        line: Line[int] = Line()
        served: list[str] = []

        async def take(tenant: Any, name: str) -> None:
            await line.get(tenant)
            served.append(name)

        async with asyncio.TaskGroup() as group:
            for name in "abcd":
                group.create_task(take(FLOOD, name))
            for name in "XY":
                group.create_task(take(OTHER, name))
            for number in range(6):
                await asyncio.sleep(0)
                line.put(number)
        assert "".join(served) == "aXbYcd"

    run_virtual(scenario())


@pytest.mark.parametrize("is_served", [False, True], ids=["before its turn", "in its turn"])
def test_a_caller_that_leaves_takes_nothing_along(is_served: bool) -> None:
    async def scenario() -> None:
        line: Line[str] = Line()
        leaving = asyncio.create_task(line.get(FLOOD))
        staying = asyncio.create_task(line.get(FLOOD))
        await asyncio.sleep(0)
        if is_served:
            line.put("the only one")
        leaving.cancel()
        await asyncio.sleep(0)
        if not is_served:
            line.put("the only one")

        assert await staying == "the only one"
        assert leaving.cancelled()
        assert not line._waiting

    run_virtual(scenario())


def take(room: Room, tenant: TenantRules, amount: int = 1) -> bool:
    return room.take(tenant.name, amount, tenant.weight_of_room)


def test_one_tenant_never_takes_all_the_room_unless_it_is_the_only_one() -> None:
    room = Room(64)
    assert sum(take(room, FLOOD) for _ in range(100)) == 57
    assert take(room, OTHER)
    room.leave(FLOOD.name, 57)
    room.leave(OTHER.name)
    assert not room._own
    assert sum(take(room, NO_TENANT) for _ in range(100)) == 64

    bytes_room = Room(900)
    assert take(bytes_room, FLOOD, 1000), "alone, anything fits"
    assert not take(bytes_room, OTHER, 1)
    bytes_room.leave(FLOOD.name, 1000)
    assert take(bytes_room, FLOOD, 700)
    assert not take(bytes_room, FLOOD, 110), "of the 90 that would be left, it may have 8 times"
    assert take(bytes_room, OTHER, 110)


def test_a_flood_of_prompts_delays_another_tenants_prompt_by_one_of_them(model_dir: Path) -> None:
    async def main() -> None:
        threads = Threads()
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"model_dir": model_dir, "run_blocking": threads}
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, tenants=tenants(), **options) as tested:

            async def tokenize(token: str) -> float:
                request = inference_pb2.TokenizeRequest(text=LARGE)
                await tested.stub.Tokenize(request, metadata=token_metadata(token))
                return loop.time()

            began_at = loop.time()
            flood = [asyncio.create_task(tokenize("acme")) for _ in range(20 * MAX_RUNNING)]
            await asyncio.sleep(0.1)
            assert await tokenize("globex") - began_at < 2.2, "a second each"
            assert max(await asyncio.gather(*flood)) - began_at > 20

    run_virtual(main())


def test_a_chat_of_many_messages_is_read_in_its_tenants_turn(model_dir: Path) -> None:
    async def main() -> None:
        threads = Threads()
        options: dict[str, Any] = {"model_dir": model_dir, "run_blocking": threads}
        async with running_router(ScriptedWorker("decode-0"), **options) as tested:
            messages = [{"role": "user", "content": "a"}] * 500
            request = inference_pb2.TokenizeRequest(
                chat=inference_pb2.ChatPrompt(messages=messages)
            )
            await tested.stub.Tokenize(request)
            assert threads.num_started == 1, "it renders to a small text"

    run_virtual(main())


def test_the_size_of_one_tenants_waiting_prompts_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, "MAX_BYTES", 900)

    async def main() -> None:
        pool = OffLoop(Threads(), retry_delay_s=0.5)

        flood = (pool.run(lambda: 1, 100, FLOOD) for _ in range(9))
        other = pool.run(lambda: 1, 80, OTHER)
        results = await asyncio.gather(*flood, other, return_exceptions=True)

        assert [type(each) for each in results] == [int] * 8 + [Overloaded, int]
        assert pool._room.taken == 0

    run_virtual(main())


async def busy_pool(monkeypatch: pytest.MonkeyPatch) -> tuple[ChildPool, asyncio.Event]:
    """A pool whose only child answers when the event is set."""
    children_that_answer(monkeypatch, [b"{}"] + [b'{"text": "good"}'] * 200)
    pool, may_answer = make_pool(1), asyncio.Event()
    await pool.start()
    ask = child_pool._Child.ask

    async def ask_later(child: Any, question: Any, wall_s: float) -> Any:
        await may_answer.wait()
        return await ask(child, question, wall_s)

    monkeypatch.setattr(child_pool._Child, "ask", ask_later)
    return pool, may_answer


def test_questions_of_one_tenant_leave_places_and_turns_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        pool, may_answer = await busy_pool(monkeypatch)
        answered: list[str] = []

        async def ask(tenant: Any) -> None:
            await pool.ask({}, tenant)
            answered.append(tenant.name)

        flood = [asyncio.create_task(ask(FLOOD)) for _ in range(100)]
        await asyncio.sleep(0)
        other = asyncio.create_task(ask(OTHER))
        await asyncio.sleep(0)
        may_answer.set()
        results = await asyncio.gather(other, *flood, return_exceptions=True)

        assert "other" in answered[:3], "after the one that ran and one more at most"
        refused = [each for each in results if isinstance(each, Overloaded)]
        assert len(refused) == 100 - len(answered) + 1
        assert 50 < len(answered) < child_pool.MAX_WAITING
        assert pool._waiting.taken == 0
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_question_whose_caller_leaves_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pool, may_answer = await busy_pool(monkeypatch)
        running = asyncio.create_task(pool.ask({}, FLOOD))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(pool.ask({}, FLOOD)) for _ in range(20)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)

        assert pool._waiting.taken == 0
        assert not pool._idle._waiting
        may_answer.set()
        assert await running == {"text": "good"}
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 10))


class Pool:
    """Answers no question before `may_answer`, and counts those that wait."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.waiting: list[str] = []

    async def ask(self, question: Any, tenant: Any) -> dict[str, str]:
        self.waiting.append(tenant.name)
        try:
            await self.may_answer.wait()
        finally:
            self.waiting.remove(tenant.name)
        return {}


def test_nobody_waits_for_a_constraint_in_another_tenants_line(tmp_path: Path) -> None:
    async def main() -> None:
        checker, pool = ChildChecker(tmp_path), Pool()

        async def pool_of(model: ServedModel) -> Any:
            return pool

        checker._pool = pool_of  # type: ignore[method-assign]
        model: Any = None

        def check(constraint: Constraint, tenant: Any) -> "asyncio.Task[None]":
            return asyncio.create_task(checker.check(constraint, model, tenant))

        one, same, other = (check(choice("a"), each) for each in (FLOOD, FLOOD, OTHER))
        await asyncio.sleep(0.1)
        assert pool.waiting == ["flood", "other"]

        one.cancel()
        await asyncio.sleep(0.1)
        assert pool.waiting == ["flood", "other"], "somebody still waits for it"
        same.cancel()
        await asyncio.sleep(0.1)
        assert pool.waiting == ["other"]
        pool.may_answer.set()
        await other
        assert list(checker._known) == [("other", choice("a"))]
        assert checker._num_bytes == choice("a").num_bytes

    run_virtual(main())
