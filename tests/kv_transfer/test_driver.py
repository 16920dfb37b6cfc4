"""A driver steps its machine at each event, in order, and at deadlines, without a task."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any

import pytest

from kv_transfer.deadlines import Wait, WaitKind
from kv_transfer.driver import Driver
from kv_transfer.protocol import DeadlinePassed, Failure, FailureKind, StreamLost
from tests.support.virtual_time import run_virtual

LIMIT_S = 2.0


@dataclass(frozen=True)
class Seen:
    """Keeps its events; "end" ends it, and so does a deadline or a lost stream."""

    events: tuple[Any, ...] = ()
    failure: Failure | None = None
    is_ended: bool = False
    is_stuck: bool = False

    @property
    def is_quiescent(self) -> bool:
        return True

    @property
    def is_finished(self) -> bool:
        return self.is_ended


def step(state: Seen, event: Any) -> tuple[Seen, tuple[Any, ...]]:
    if event == "bug":
        raise ZeroDivisionError("of the machine")
    state = replace(state, events=(*state.events, event))
    if isinstance(event, DeadlinePassed | StreamLost):
        state = replace(state, failure=Failure(FailureKind.TIMEOUT, "late"), is_ended=True)
    return replace(state, is_ended=state.is_ended or event == "end"), (event,)


def waiting_for(state: Seen) -> Wait | None:
    is_forgotten = "no deadline" in state.events
    return None if is_forgotten else Wait(kind=WaitKind.CHUNK, chunk=len(state.events))


def driver(execute: Callable[[Any], None] = lambda action: None) -> Driver[Seen, Any, Any]:
    return Driver(
        state=Seen(),
        step=step,
        waiting_for=waiting_for,
        seconds=lambda wait: LIMIT_S,
        execute=execute,
    )


def test_an_event_is_applied_before_post_returns_and_one_of_an_action_after_its_step() -> None:
    async def main() -> None:
        executed: list[str] = []

        def execute(action: str) -> None:
            if action == "first":
                tested.post("third")
                tested.post("fourth")
            executed.append(action)

        tested = driver(execute)
        tested.post("first")
        assert executed == ["first", "third", "fourth"]
        tested.post("end")
        await tested.outcome()
        tested.post("late")
        assert tested.state.events == ("first", "third", "fourth", "end")

    run_virtual(main())


def test_each_wait_has_its_own_deadline() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tested = driver()
        running = asyncio.ensure_future(tested.outcome())
        for _ in range(3):
            await asyncio.sleep(0.9 * LIMIT_S)
            tested.post("news")
        with pytest.raises(Exception, match="late"):
            await running
        assert loop.time() == pytest.approx(3 * 0.9 * LIMIT_S + LIMIT_S)

    run_virtual(main())


@pytest.mark.parametrize("event", ["bug", "news", "no deadline"])
def test_a_bug_of_the_machine_or_of_an_action_is_the_outcome(event: str) -> None:
    async def main() -> None:
        def execute(action: Any) -> None:
            if action == "news":
                raise ZeroDivisionError("of an action")

        tested = driver(execute)
        tested.post(event)
        with pytest.raises((ZeroDivisionError, AssertionError)):
            await tested.outcome()
        await tested.wait_quiescent()
        called = []
        tested.call_when_quiescent(lambda: called.append(1))
        assert called == [1]

    run_virtual(main())


def test_a_job_that_reports_the_end_is_not_cancelled_and_the_others_are() -> None:
    async def main() -> None:
        ended: list[str] = []

        async def reports() -> None:
            await asyncio.sleep(0.1)
            tested.post("end")
            await asyncio.sleep(0)
            ended.append("reports")

        async def waits() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        tested = driver()
        for job in (reports(), waits()):
            tested.spawn(job)
        await tested.outcome()
        await tested.wait_quiescent()
        assert sorted(ended) == ["cancelled", "reports"]

    run_virtual(main())


def test_a_job_that_was_cancelled_before_it_began_is_closed() -> None:
    async def main() -> None:
        tested = driver()
        job = asyncio.sleep(60)
        tested.spawn(job)
        tested.post("end")
        await tested.wait_quiescent()
        assert getcoroutinestate(job) == CORO_CLOSED

    run_virtual(main())
