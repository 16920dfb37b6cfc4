"""Work on grammars leaves threads to others, and no tenant waits for all work of another."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kv_transfer.pair import Panic
from tests.support.virtual_time import run_inline, run_virtual
from worker import grammar_threads
from worker.background import BackgroundTasks
from worker.grammar_threads import MAX_RUNNING, TURN_S, GrammarThreads

SOON_S = 10.0
LONG_S = 1.5 * TURN_S


def in_threads(body: Coroutine[Any, Any, None], num_threads: int = MAX_RUNNING + 1) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(num_threads))
        async with asyncio.timeout(SOON_S):
            await body

    asyncio.run(main())


def test_pages_find_a_thread_while_grammars_take_long() -> None:
    go_on = threading.Event()

    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(asyncio.to_thread, tasks)
        for number in range(20):
            threads.add(b"%d" % number, lambda: go_on.wait(SOON_S), lambda _: None)
            await asyncio.sleep(0.01)  # a request at a time, as they come
        try:
            assert await asyncio.to_thread(lambda: "digests") == "digests"
        finally:
            go_on.set()
        await tasks.wait()

    in_threads(main())


def test_a_tenant_waits_for_a_turn_of_another_and_not_for_all_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_threads, "MAX_RUNNING", 1)
    done: list[str] = []

    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(asyncio.to_thread, tasks)

        def add(name: str) -> None:
            threads.add(name[:1].encode(), lambda: time.sleep(LONG_S), lambda _: done.append(name))

        for number in range(30):
            add(f"a{number}")
        await asyncio.sleep(2 * LONG_S)
        for number in range(3):
            add(f"b{number}")
            add(f"c{number}")
        await tasks.wait()

    in_threads(main())
    for name in "abc":
        own = [each for each in done if each.startswith(name)]
        assert own == [f"{name}{number}" for number in range(len(own))], "not in order"
    first = done.index("b0")
    assert first < 15
    others = [name[0] for name in done[first:] if name[0] != "a"]
    assert "".join(others) == "bcbcbc"
    assert done.index("c2") < first + 3 * 3 + 1, "a, b and c do not alternate"
    assert len(done) == 36


def test_short_work_waits_for_one_long_piece_of_another_tenant_and_its_result_for_none() -> None:
    begun: list[str] = []
    is_over: dict[str, threading.Event] = {}

    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(asyncio.to_thread, tasks)

        def long(name: str) -> None:
            begun.append(name)
            assert is_over[name].wait(SOON_S)

        async def begin(num_pieces: int) -> None:
            while len(begun) < num_pieces:
                await asyncio.sleep(0.001)

        threads.add(b"a", lambda: time.sleep(LONG_S), lambda _: None)
        for number in range(MAX_RUNNING + 4):
            name = f"a{number}"
            is_over[name] = threading.Event()
            threads.add(b"a", lambda name=name: long(name), lambda _: None)
        try:
            await begin(MAX_RUNNING)  # each of which takes longer than a turn
            for ended in range(4):
                short = asyncio.create_task(threads.run(b"b", lambda: "short"))
                await asyncio.sleep(LONG_S)
                assert not short.done()
                is_over[begun[ended]].set()
                assert await asyncio.wait_for(short, 1.0) == "short", "it waits for more of a's"
                await begin(MAX_RUNNING + ended + 1)
        finally:
            for each in is_over.values():
                each.set()
        await tasks.wait()
        assert not threads._slow
        assert not threads._waiting

    in_threads(main())


def test_long_work_that_came_at_once_is_shared_among_threads() -> None:
    meeting = threading.Barrier(MAX_RUNNING)

    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(asyncio.to_thread, tasks)
        told: list[Exception | None] = []
        threads.add(b"", lambda: time.sleep(LONG_S), told.append)
        for _ in range(MAX_RUNNING):
            threads.add(b"", lambda: meeting.wait(SOON_S), told.append)
        await tasks.wait()
        assert told == [None] * (1 + MAX_RUNNING)

    in_threads(main())


def test_short_work_of_many_shares_a_turn() -> None:
    turns: list[int] = []

    async def noted(function: Any, /) -> Any:
        turns.append(len(done))
        return await run_inline(function)

    done: list[int] = []

    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(noted, tasks)
        for number in range(100):
            threads.add(b"%d" % (number % 3), lambda: None, lambda _, n=number: done.append(n))
        await tasks.wait()

    run_virtual(main())
    assert turns == [0], "several threads were asked"
    assert done == list(range(100))


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_an_error_is_told_to_whoever_asked(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("planted")

    async def main() -> None:
        threads = GrammarThreads(run_inline, BackgroundTasks())
        found = await asyncio.gather(
            threads.run(b"a", lambda: 1),
            threads.run(b"a", fails),
            threads.run(b"b", lambda: 3),
            return_exceptions=True,
        )
        assert found[0::2] == [1, 3]
        assert isinstance(found[1], Exception)
        assert "planted" in str(found[1])

    run_virtual(main())


def test_who_leaves_takes_nothing_along() -> None:
    async def main() -> None:
        tasks = BackgroundTasks()
        threads = GrammarThreads(run_inline, tasks)
        leaving = asyncio.create_task(threads.run(b"a", lambda: 1))
        staying = asyncio.create_task(threads.run(b"a", lambda: 2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == 2
        assert leaving.cancelled()
        await tasks.wait()

    run_virtual(main())
