"""The pool of children, with doubles of them: none is lost or left behind, whatever happens."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from router import child_pool
from router.errors import ChildLimit
from router.tenants.tenant import NO_TENANT
from tests.router.fake_children import Process, children_that_answer, make_pool
from tests.support.waiting import until


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("wrong", [b"5", b"null", b'"text"', b"[]", b'{"text": 5}', b"\xff", b"{"])
def test_a_child_that_writes_no_answer_is_replaced(
    monkeypatch: pytest.MonkeyPatch, wrong: bytes
) -> None:
    async def scenario() -> None:
        children_that_answer(monkeypatch, [b"{}", wrong], [b"{}", b'{"text": "good"}'])
        pool = make_pool(1)
        await pool.start()

        with pytest.raises(ChildLimit, match="no valid answer"):
            await pool.ask({}, NO_TENANT)

        assert await pool.ask({}, NO_TENANT) == {"text": "good"}
        await pool.close()
        assert Process.num_running == 0

    run(scenario)


def test_a_question_that_cannot_be_written_costs_no_child_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        children_that_answer(monkeypatch, [b"{}"], [b"{}", b'{"text": "good"}'])
        pool = make_pool(1)
        await pool.start()

        with pytest.raises(UnicodeEncodeError):
            await pool.ask({"text": "\ud800"}, NO_TENANT)

        assert await pool.ask({}, NO_TENANT) == {"text": "good"}
        await pool.close()

    run(scenario)


def test_children_that_are_ready_end_with_a_start_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        children_that_answer(monkeypatch, [b"{}"], [b'{"error": "too large"}'], [b"{}"])

        with pytest.raises(ValueError, match="too large"):
            await make_pool(3).start()

        assert Process.num_running == 0

    run(scenario)


def test_a_start_that_is_cancelled_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(**_: object) -> None:
        await asyncio.sleep(60)

    async def scenario() -> None:
        monkeypatch.setattr(Process, "num_running", 0)
        monkeypatch.setattr(child_pool.subprocess, "Popen", lambda *_, **__: Process())
        monkeypatch.setattr(asyncio, "open_connection", hang)
        starting = asyncio.create_task(make_pool(2).start())
        await until(lambda: Process.num_running == 2)

        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

        assert Process.num_running == 0

    run(scenario)
