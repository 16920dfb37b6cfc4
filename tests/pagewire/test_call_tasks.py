"""Who was cancelled: the task that waits, or what it waits for; and whose error was seen."""

import asyncio
import gc
from typing import Any

import pytest

from pagewire.protos.call_tasks import is_own_cancellation, mark_seen


async def wait_and_tell(waited_for: "asyncio.Future[None]") -> bool:
    try:
        await waited_for
    except asyncio.CancelledError:
        return is_own_cancellation()
    raise AssertionError("nothing was cancelled")


def test_a_task_that_is_cancelled_is_told_from_one_whose_call_is() -> None:
    async def main() -> None:
        call = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(wait_and_tell(call))
        await asyncio.sleep(0)
        call.cancel()
        assert not await waiting

        call = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(wait_and_tell(call))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await waiting

    asyncio.run(main())


@pytest.mark.parametrize("is_marked", [False, True])
def test_only_an_error_that_is_not_marked_as_seen_is_complained_of(is_marked: bool) -> None:
    complaints: list[dict[str, Any]] = []

    async def fail() -> None:
        raise RuntimeError("planted")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        tasks = [loop.create_task(fail()), loop.create_task(asyncio.sleep(1000))]
        tasks[1].cancel()
        for task in tasks:
            if is_marked:
                task.add_done_callback(mark_seen)
        await asyncio.wait(tasks)

    asyncio.run(main())
    gc.collect()
    assert bool(complaints) is not is_marked
