"""The step loop with a scheduler and an engine of a few lines: what a failed pass costs whom."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from llm_engine.engine_step import EngineStep, StepResult
from tests.support.virtual_time import run_virtual
from worker import step_loop
from worker.errors import (
    EngineFailed,
    EngineHangs,
    EngineLost,
    Failing,
    PassFailed,
    WorkerError,
)
from worker.step_loop import StepLoop
from worker.wake import Wake

PROBE: Any = "probe"
AGAIN: Any = "again"
RECORDING = "recording"


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "IDLE_S", 0.01)


@dataclass(frozen=True)
class Request:
    request_id: str


@dataclass(frozen=True)
class Plan:
    requests: tuple[Request, ...]
    is_alone: bool = False
    is_partial: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.requests

    @property
    def num_tokens(self) -> int:
        return len(self.requests)

    @property
    def request_ids(self) -> list[str]:
        return [each.request_id for each in self.requests]

    def engine_step(self, eos_token_ids: tuple[int, ...], *, is_again: bool) -> EngineStep:
        names: Any = tuple(each.request_id for each in self.requests)
        return EngineStep(slices=(*names, AGAIN) if is_again else names)

    def halves(self) -> Sequence["Plan"]:
        if len(self.requests) < 2:
            return ()
        middle = len(self.requests) // 2
        return Plan(self.requests[:middle]), Plan(self.requests[middle:])


class World:
    """Scheduler, listener and engine in one.

    Args:
        num_requests: Each is done after one step.
        most: Requests in a step.
        max_launched: Steps that may be launched and not read.
    """

    def __init__(
        self,
        num_requests: int,
        max_failed_passes: int = 3,
        *,
        most: int = 100,
        max_launched: int = 1,
    ) -> None:
        self.engine = self  # of the executor
        self.max_launched = max_launched
        self.most = most
        self.planned_for: set[Request] = set()
        self.launched: deque[tuple[Any, ...]] = deque()
        self.num_ahead = 0  # steps launched behind another
        self.num_again = 0  # steps that start their seats afresh
        self.failing_launches: set[str] = set()  # launches with one of these fail, once
        self.alone: set[str] = set()
        self.left = [Request(f"r{index}") for index in range(num_requests)]
        self.bad: set[str] = set()  # passes with one of these fail
        self.undrawn: set[str] = set()
        self.error: Exception = RuntimeError("injected")
        self.passes: list[list[str]] = []
        self.done: list[str] = []
        self.failures: dict[str, WorkerError] = {}
        self.has_page = True
        self.num_unrecorded = 0
        self.num_asked = 0  # times to record
        self.wake = Wake()
        self.loop: StepLoop[Plan, Request, str] = StepLoop(
            scheduler=self,
            listener=self,
            executor=self,  # type: ignore[arg-type]
            eos_token_ids=(),
            before_step=lambda: None,
            wake=self.wake,
            make_probe=self.probe,
            max_failed_passes=max_failed_passes,
        )

    async def run(self) -> None:
        """Step until nothing is left."""
        stepping = asyncio.create_task(self.loop.run())
        while self.left and not stepping.done():
            await asyncio.sleep(0)
        if not stepping.done():
            stepping.cancel()
            await asyncio.wait({stepping})
        if not stepping.cancelled():
            stepping.result()

    # The scheduler.

    def next_step(self) -> Plan:
        due = [each for each in self.left if each not in self.planned_for][: self.most]
        self.planned_for.update(due)
        return Plan(tuple(due), is_alone=any(each.request_id in self.alone for each in due))

    def end_undrawn(self, plan: Plan, result: StepResult) -> list[Request]:
        pairs = zip(plan.requests, result.slices, strict=True)
        undrawn = [each for each, tokens in pairs if not tokens]
        self.left = [each for each in self.left if each not in undrawn]
        return undrawn

    def complete_step(self, plan: Plan, result: StepResult) -> list[str]:
        done = [each for each in plan.requests if each in self.left]
        self.left = [each for each in self.left if each not in done]
        return [each.request_id for each in done]

    def fail_step(self, plan: Plan) -> list[Request]:
        failed = [each for each in plan.requests if each in self.left]
        self.left = [each for each in self.left if each not in failed]
        return failed

    # The listener.

    def planned(self, plan: Plan) -> None:
        pass

    def progressed(self, progress: Sequence[str]) -> None:
        self.done += progress

    def failed(self, work: Request, error: WorkerError) -> None:
        self.failures[work.request_id] = error

    # The engine.

    async def launch(self, step: EngineStep) -> None:
        assert len(self.launched) < self.max_launched
        names = step.slices
        self.passes.append([each for each in names if each != AGAIN])  # type: ignore[misc]
        self.num_again += AGAIN in names
        if self.failing_launches & set(names):  # type: ignore[arg-type]
            self.failing_launches = set()
            raise self.error
        self.num_ahead += bool(self.launched)
        self.launched.append(names)

    async def read(self) -> StepResult:
        names = [each for each in self.launched.popleft() if each != AGAIN]
        if self.bad & set(names):
            raise self.error
        drawn: Any = [() if each in self.undrawn else (1,) for each in names]
        return StepResult(decodes=(), slices=drawn)

    async def record_next(self) -> bool:
        assert not self.launched, "a step may still run"
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.num_unrecorded == 0:
            return False
        self.passes.append([RECORDING])
        self.num_unrecorded -= 1
        return True

    @contextmanager
    def probe(self) -> Iterator[Any]:
        yield PROBE if self.has_page else None


def run(world: World) -> World:
    asyncio.run(asyncio.wait_for(world.run(), 10))
    return world


def test_a_pass_that_fails_once_costs_nobody_anything() -> None:
    world = World(5)
    world.failing_launches = {"r3"}
    run(world)

    assert world.failures == {}
    assert world.done == [f"r{index}" for index in range(5)]
    assert world.passes[1:] == [["probe"], ["r0", "r1"], ["r2", "r3", "r4"]]


def test_while_a_step_runs_the_next_one_is_launched() -> None:
    world = run(World(6, most=2, max_launched=2))

    assert world.done == [f"r{index}" for index in range(6)]
    assert world.num_ahead == 2
    assert (world.loop.num_steps, world.loop.num_steps_ahead) == (3, 2)


def test_steps_that_fail_or_are_dropped_do_not_count_as_ahead() -> None:
    world = World(6, most=2, max_launched=2)
    world.bad = {"r2"}
    run(world)

    assert world.num_ahead == 2, "the step that failed, and the one that was dropped behind it"
    assert (world.loop.num_steps, world.loop.num_steps_ahead) == (3, 0)


@pytest.mark.parametrize("where", ["launch", "step"])
@pytest.mark.parametrize("index", range(6))
def test_what_was_launched_behind_a_step_that_fails_is_computed_again_after_it(
    index: int, where: str
) -> None:
    world = World(6, most=2, max_launched=2)
    if where == "step":
        world.bad = {f"r{index}"}
    else:
        world.failing_launches = {f"r{index}"}
    run(world)

    assert list(world.failures) == [f"r{index}"] * (where == "step")
    assert world.done == [f"r{i}" for i in range(6) if f"r{i}" not in world.failures]
    assert not world.launched


def test_while_requests_arrive_no_step_is_launched_ahead() -> None:
    class Burst(Wake):
        is_in_burst = True

    world = World(6, most=2, max_launched=2)
    world.wake = world.loop._wake = Burst()
    run(world)

    assert world.done == [f"r{index}" for index in range(6)]
    assert world.num_ahead == 0


def test_steps_that_are_to_run_alone_have_no_other_beside_them() -> None:
    world = World(3, most=1, max_launched=2)
    world.alone = {"r1"}
    run(world)

    assert world.done == ["r0", "r1", "r2"]
    assert world.num_ahead == 0
    assert (world.loop.num_steps, world.loop.num_steps_alone) == (3, 1)


def test_a_step_alone_relies_on_no_seat_of_an_older_one_that_failed_after_it_was_planned() -> None:
    world = World(2, most=1, max_launched=2)
    world.alone = {"r1"}
    world.bad = {"r0"}
    run(world)

    assert world.passes == [["r0"], ["probe"], ["r1"]]
    assert world.done == ["r1"]
    assert world.num_again == 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_loop_that_ends_keeps_no_pages_for_a_step_alone_that_it_did_not_launch(
    is_lost: bool,
) -> None:
    async def scenario() -> World:
        world = World(2, most=1, max_launched=2)
        world.alone = {"r1"}
        world.bad = {"r0"}
        world.error = AcceleratorError("injected")
        is_read = asyncio.Event()
        read = world.read

        async def hold() -> StepResult:
            is_read.set()
            await asyncio.sleep(0 if is_lost else 1000)
            return await read()

        world.read = hold  # type: ignore[method-assign]
        stepping = asyncio.create_task(world.loop.run())
        await is_read.wait()
        assert len(world.planned_for) == 2
        if not is_lost:
            world.read = read  # type: ignore[method-assign]
            stepping.cancel()
        await asyncio.wait({stepping})
        if is_lost:
            with pytest.raises(EngineLost):
                stepping.result()
        return world

    world = asyncio.run(scenario())

    assert world.passes == [["r0"]]
    assert list(world.failures) == ["r0"] * is_lost, "a pass that was not launched"
    assert world.left == [], "a plan was neither settled nor failed"


def test_a_step_alone_that_fails_does_not_count() -> None:
    world = World(3, most=1, max_launched=2)
    world.alone = world.bad = {"r1"}
    run(world)

    assert world.done == ["r0", "r2"]
    assert (world.loop.num_steps, world.loop.num_steps_alone) == (2, 0)


def test_cancelled_the_loop_waits_for_what_it_launched_and_nobody_hears_of_it() -> None:
    async def scenario() -> World:
        world = World(6, most=2, max_launched=2)
        stuck = asyncio.Event()

        async def read() -> StepResult:
            stuck.set()
            try:
                await asyncio.sleep(1000)
            finally:
                world.launched.popleft()
            raise AssertionError

        world.read = read  # type: ignore[method-assign]
        stepping = asyncio.create_task(world.loop.run())
        await stuck.wait()
        assert len(world.launched) == 2
        world.read = World.read.__get__(world)  # type: ignore[method-assign]
        stepping.cancel()
        await asyncio.wait({stepping})
        return world

    world = asyncio.run(scenario())

    assert not world.launched
    assert world.done == []
    assert [each.request_id for each in world.left] == ["r4", "r5"], "four were ended"


@pytest.mark.parametrize("index", range(8))
def test_the_request_that_fails_alone_is_found_and_the_others_go_on(index: int) -> None:
    world = World(8)
    world.bad = {f"r{index}"}
    run(world)

    assert list(world.failures) == [f"r{index}"]
    assert isinstance(world.failures[f"r{index}"], PassFailed)
    assert len(world.done) == 7
    real = [each for each in world.passes if each != ["probe"]]
    assert len(real) == 1 + 2 * 3, "two halves for each of three levels"
    assert world.loop.num_steps == 3, "passes that failed are no progress"


def test_several_bad_requests_end_no_engine_that_still_computes() -> None:
    world = World(8)
    world.bad = {"r0", "r3", "r5", "r6"}
    run(world)

    assert set(world.failures) == world.bad
    assert len(world.done) == 4


def test_a_request_without_a_token_fails_for_good_and_alone() -> None:
    world = World(3)
    world.undrawn = {"r1"}
    run(world)

    assert isinstance(world.failures["r1"], EngineFailed)
    assert world.done == ["r0", "r2"]


def test_an_engine_that_computes_nothing_is_given_up_and_no_request_is_blamed() -> None:
    world = World(4)
    world.bad = {"r0", "r1", "r2", "r3", "probe"}
    with pytest.raises(EngineLost, match="injected"):
        run(world)

    assert all(isinstance(each, Failing) for each in world.failures.values())
    assert len(world.failures) == 4
    assert len(world.passes) == 3, "a pass and two probes"
    assert world.loop.num_steps == 0


def test_one_probe_that_fails_is_not_enough() -> None:
    world = World(2)
    world.bad = {"r0", "probe"}
    read = world.read

    async def recovers() -> StepResult:
        try:
            return await read()
        except RuntimeError:
            if len(world.passes) == 2:
                world.bad = {"r0"}
            raise

    world.read = recovers  # type: ignore[method-assign]
    run(world)

    assert list(world.failures) == ["r0"]
    assert world.done == ["r1"]


class AcceleratorError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("x"),
        RuntimeError("CUDA error: device-side assert triggered"),
        EngineHangs("x"),
    ],
)
def test_a_lost_device_ends_the_worker_at_once_and_blames_those_in_the_pass(
    error: Exception,
) -> None:
    world = World(4)
    world.bad, world.error = {"r2"}, error
    with pytest.raises(EngineLost):
        run(world)

    assert all(isinstance(each, PassFailed) for each in world.failures.values())
    assert len(world.failures) == 4
    assert len(world.passes) == 1, "nothing more is asked of a device that is gone"


@pytest.mark.parametrize("shows_in", ["read", "next launch"])
def test_where_a_device_is_lost_under_two_steps_those_in_both_are_told_and_nothing_is_settled(
    shows_in: str,
) -> None:
    world = World(6, most=2, max_launched=2)
    world.error = AcceleratorError("x")
    world.bad = {"r0", "r2"}  # whatever is read fails from now on
    if shows_in == "next launch":
        world.failing_launches = {"r2"}
    with pytest.raises(EngineLost):
        run(world)

    assert list(world.failures) == ["r0", "r1", "r2", "r3"]
    assert all(isinstance(each, PassFailed) for each in world.failures.values())
    assert (world.done, world.loop.num_steps) == ([], 0)
    assert not world.launched, "a step still ran when its pages could be given away"


def loses_the_device_next(world: World, error: Exception) -> None:
    """Let the first read that fails raise another error than all later ones."""
    read = world.read

    async def reads() -> StepResult:
        try:
            return await read()
        except RuntimeError:
            world.error = error
            raise

    world.read = reads  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [AcceleratorError("x"), EngineHangs("x")])
def test_a_device_lost_under_a_step_that_is_dropped_is_told_as_any_other(error: Exception) -> None:
    world = World(6, most=2, max_launched=2)
    world.bad = {"r0", "r2", "probe"}
    loses_the_device_next(world, error)
    with pytest.raises(EngineLost, match="x"):
        run(world)

    assert list(world.failures) == ["r0", "r1", "r2", "r3"]
    assert all(isinstance(each, PassFailed) for each in world.failures.values())
    assert len(world.passes) == 2, "nothing more is asked of a device that is gone"


@pytest.mark.parametrize("error", [AcceleratorError("x"), EngineHangs("x")])
def test_a_device_lost_under_the_probe_after_a_failed_pass_is_told_to_those_in_the_pass(
    error: Exception,
) -> None:
    world = World(2, max_failed_passes=9)
    world.bad = {"r0", "probe"}
    loses_the_device_next(world, error)
    with pytest.raises(EngineLost, match="injected"):
        run(world)

    assert list(world.failures) == ["r0", "r1"]
    assert all(isinstance(each, PassFailed) for each in world.failures.values())
    assert len(world.passes) == 2, "nothing more is asked of a device that is gone"


def test_without_a_page_to_probe_with_failures_in_a_row_end_the_worker() -> None:
    world = World(2, max_failed_passes=4)
    world.has_page = False
    world.bad = {"r0", "r1"}
    run(world)
    assert len(world.failures) == 2, "three passes: both, and each alone"

    world.left = [Request("r2")]
    world.bad = {"r2"}
    with pytest.raises(EngineLost):
        run(world)


@asynccontextmanager
async def idle_loop(world: World) -> AsyncIterator[asyncio.Task[None]]:
    """Step beside the test, until it ends or cancels the task."""
    stepping = asyncio.create_task(world.loop.run())
    yield stepping
    stepping.cancel()
    await asyncio.wait({stepping})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def arrive(world: World, name: str) -> None:
    world.left.append(Request(name))
    world.wake.set()


def test_a_request_waits_for_one_recording_at_most_and_all_are_made_once() -> None:
    async def scenario() -> World:
        world = World(1)
        world.num_unrecorded = 3

        async def record_next() -> bool:
            if world.num_asked == 1:  # the second
                arrive(world, "during")
            return await World.record_next(world)

        world.record_next = record_next  # type: ignore[method-assign]
        async with idle_loop(world):
            await until(lambda: world.num_asked == 4)
            arrive(world, "later")
            await until(lambda: not world.left)
            await asyncio.sleep(0.02)
        return world

    world = asyncio.run(scenario())

    assert world.passes == [["r0"], [RECORDING], [RECORDING], ["during"], [RECORDING], ["later"]]
    assert world.num_asked == 4, "it was told that none is left"


def test_nothing_is_recorded_between_requests_that_come_in_turns() -> None:
    pause_s = step_loop.IDLE_S / 2

    async def scenario() -> World:
        world = World(0)
        world.num_unrecorded = 1
        async with idle_loop(world):
            for number in range(8):
                await asyncio.sleep(pause_s)
                arrive(world, f"r{number}")
                await until(lambda: not world.left)
            await asyncio.sleep(pause_s)
            assert world.num_asked == 0
            await asyncio.sleep(2 * pause_s)
        return world

    world = run_virtual(scenario())

    assert world.passes == [*([f"r{number}"] for number in range(8)), [RECORDING]]


def test_an_engine_without_work_is_asked_now_and_then_and_one_with_work_never() -> None:
    async def scenario() -> World:
        world = World(0)
        async with idle_loop(world):
            for number in range(4):
                await asyncio.sleep(0.8 * step_loop.CHECK_S)
                arrive(world, f"r{number}")
                await until(lambda: not world.left)
            await asyncio.sleep(2.5 * step_loop.CHECK_S)
        return world

    world = run_virtual(scenario())

    assert world.passes == [*([f"r{number}"] for number in range(4)), [], []]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [(RuntimeError("injected"), False), (AcceleratorError("x"), True), (EngineHangs("x"), True)],
)
@pytest.mark.parametrize("fails_at", ["launch", "read"])
def test_an_idle_worker_whose_engine_loses_its_device_ends(
    error: Exception, is_lost: bool, fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> World:
        world = World(0)

        async def fail(*args: Any) -> Any:
            if fails_at == "read":
                world.launched.popleft()
            delattr(world, fails_at)  # once
            raise error

        async with idle_loop(world) as stepping:
            await asyncio.sleep(0.5 * step_loop.CHECK_S)
            setattr(world, fails_at, fail)
            await asyncio.sleep(step_loop.CHECK_S)
            if stepping.done():
                stepping.result()
            arrive(world, "later")
            await until(lambda: not world.left)
        return world

    if is_lost:
        with pytest.raises(EngineLost):
            run_virtual(scenario())
    else:
        assert run_virtual(scenario()).passes[-2:] == [[PROBE], ["later"]]
    assert [each.message for each in caplog.records] == ["check_failed"]


def test_no_pass_is_recorded_while_a_step_runs() -> None:
    world = World(6, most=2, max_launched=2)
    world.num_unrecorded = 1
    run(world)

    assert world.passes == [["r0", "r1"], ["r2", "r3"], ["r4", "r5"]]


def test_cancelled_while_it_records_the_loop_ends() -> None:
    async def scenario() -> None:
        world = World(0)
        begun = asyncio.Event()

        async def record_next() -> bool:
            begun.set()
            return await asyncio.Future()

        world.record_next = record_next  # type: ignore[method-assign]
        async with idle_loop(world) as stepping:
            await begun.wait()
            stepping.cancel()
            await asyncio.wait({stepping}, timeout=10)
            assert stepping.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [(RuntimeError("injected"), False), (AcceleratorError("x"), True), (EngineHangs("x"), True)],
)
def test_a_recording_that_fails_ends_the_worker_only_if_its_engine_no_longer_computes(
    error: Exception, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> World:
        world = World(0)
        world.num_unrecorded = 2

        async def record_next() -> bool:
            await World.record_next(world)
            raise error

        world.record_next = record_next  # type: ignore[method-assign]
        async with idle_loop(world) as stepping:
            await until(lambda: world.num_asked > 0)
            arrive(world, "later")
            await until(lambda: stepping.done() or not world.left)
            if stepping.done():
                stepping.result()
        return world

    if is_lost:
        with pytest.raises(EngineLost):
            asyncio.run(scenario())
    else:
        world = asyncio.run(scenario())
        assert world.passes == [[RECORDING], [PROBE], ["later"]]
        assert world.num_asked == 1, "it fails again and again"
        assert world.failures == {}
    assert [each.message for each in caplog.records] == ["recording_failed"]
