import asyncio
import random

import pytest

from tests.support.virtual_time import (
    DeadlockError,
    LeftBehindError,
    Process,
    TimeLimitError,
    run_virtual,
    wait_until,
)


def test_time_jumps_to_the_next_timer() -> None:
    async def scenario() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(1000.0)
        slept_until = loop.time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=7.5)
        return slept_until, loop.time()

    assert run_virtual(scenario()) == (1000.0, 1007.5)


def test_a_wait_without_a_deadline_is_a_deadlock_that_names_the_task() -> None:
    async def forgetful() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        await asyncio.create_task(forgetful(), name="the forgetful one")

    with pytest.raises(DeadlockError, match="the forgetful one"):
        run_virtual(scenario())


def test_a_run_that_never_ends_or_spins_is_stopped() -> None:
    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(0.5)

    async def spinner() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(TimeLimitError, match="limit of 60"):
        run_virtual(heartbeat(), limit_s=60.0)
    with pytest.raises(TimeLimitError, match="time does not pass"):
        run_virtual(spinner())


def test_threads_are_refused() -> None:
    with pytest.raises(RuntimeError, match="virtual time has one thread"):
        run_virtual(asyncio.to_thread(print))


def test_an_error_that_nobody_awaits_fails_the_run() -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: 1 // 0)
        await asyncio.sleep(2.0)

    with pytest.raises(LeftBehindError, match="ZeroDivisionError"):
        run_virtual(scenario())


def test_a_killed_process_runs_nothing_more_not_even_cleanup() -> None:
    ticks: list[float] = []

    async def ticker() -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                ticks.append(asyncio.get_running_loop().time())
        finally:
            ticks.append(-1.0)

    async def scenario() -> list[float]:
        process = Process("worker")
        process.spawn(ticker())
        await asyncio.sleep(2.5)
        process.kill()
        await asyncio.sleep(100.0)
        return list(ticks)

    assert run_virtual(scenario()) == [1.0, 2.0]


def test_a_paused_process_goes_on_late_and_keeps_cancelled_timers_cancelled() -> None:
    async def scenario() -> list[str]:
        events: list[str] = []
        process = Process("worker")
        inbox: asyncio.Queue[str] = asyncio.Queue()

        async def reader() -> None:
            loop = asyncio.get_running_loop()
            while True:
                try:
                    message = await asyncio.wait_for(inbox.get(), timeout=3.0)
                except TimeoutError:
                    message = "timeout"
                events.append(f"{message} at {loop.time():.0f}")

        process.spawn(reader())
        await asyncio.sleep(1.0)
        process.pause()
        inbox.put_nowait("hello")
        await asyncio.sleep(9.0)
        process.resume()
        await asyncio.sleep(4.0)
        return events

    # The message came first, so the timer that ran out during the pause cancels nothing.
    assert run_virtual(scenario()) == ["hello at 10", "timeout at 13"]


def test_equal_seeds_give_equal_runs() -> None:
    async def scenario(seed: int) -> list[tuple[float, int]]:
        rng = random.Random(seed)
        trace: list[tuple[float, int]] = []

        async def walker(index: int) -> None:
            for _ in range(20):
                await asyncio.sleep(rng.random())
                trace.append((asyncio.get_running_loop().time(), index))

        await asyncio.gather(*(walker(index) for index in range(5)))
        return trace

    assert run_virtual(scenario(1)) == run_virtual(scenario(1))
    assert run_virtual(scenario(1)) != run_virtual(scenario(2))


def test_wait_until_gives_up_after_its_timeout() -> None:
    with pytest.raises(AssertionError, match="the impossible did not become true"):
        run_virtual(wait_until(lambda: False, timeout_s=2.0, what="the impossible"))
