"""Background tasks end one by one, and one that breaks is told."""

import asyncio
from inspect import CORO_CLOSED, getcoroutinestate

import pytest

from tests.support.virtual_time import run_virtual
from worker.background import BackgroundTasks


def test_work_that_was_cancelled_before_it_began_is_closed() -> None:
    async def main() -> None:
        tasks = BackgroundTasks()
        work = asyncio.sleep(60)
        tasks.start(work, name="idle").cancel()
        await tasks.wait()
        assert getcoroutinestate(work) == CORO_CLOSED

    run_virtual(main())


def test_the_error_of_the_first_task_that_breaks_is_raised_and_others_go_on() -> None:
    async def main() -> None:
        tasks = BackgroundTasks()
        ended: list[str] = []

        async def work(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(name)
            if name != "sound":
                raise ZeroDivisionError(name)

        for name, seconds in (("second", 2.0), ("first", 1.0), ("sound", 3.0)):
            tasks.start(work(name, seconds), name=name)
        with pytest.raises(ZeroDivisionError, match="first"):
            await tasks.wait_crashed()
        await tasks.wait()
        assert ended == ["first", "second", "sound"]
        with pytest.raises(ZeroDivisionError, match="first"):
            await tasks.wait_crashed()

    run_virtual(main())
