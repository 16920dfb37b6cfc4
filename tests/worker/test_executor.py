import asyncio
import gc
import threading
import weakref

import pytest

from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import Draw, SamplingParams, SequenceSlice
from tests.support.fake_engine import FakeEngine, FakeModel, fake_tokens
from worker.errors import EngineClosed, EngineHangs
from worker.executor import ThreadExecutor

MODEL = FakeModel()
PARAMS = SamplingParams(max_tokens=1)


def first_step() -> EngineStep:
    draw = Draw(params=PARAMS, seed=0, position=2, prompt_token_ids=[5, 6], output_token_ids=[])
    prompt = SequenceSlice(
        token_ids=[5, 6], start=0, page_ids=[0], num_prompt_tokens=2, draws=(draw,)
    )
    return EngineStep(slices=(prompt,))


class GatedEngine(FakeEngine):
    """A step that ends only when the test lets it; fails if it is told to."""

    def __init__(self) -> None:
        super().__init__(MODEL, num_pages=4, page_size=4)
        self.gate = threading.Event()
        self.started = threading.Event()
        self.thread_names: set[str] = set()
        self.failure: Exception | None = None
        self.finished = 0

    def launch(self, step: EngineStep) -> None:
        self.thread_names.add(threading.current_thread().name)
        super().launch(step)

    def read(self) -> StepResult:
        self.started.set()
        assert self.gate.wait(10)
        self.thread_names.add(threading.current_thread().name)
        result = super().read()
        if self.failure is not None:
            raise self.failure
        self.finished += 1
        return result


async def run_step(executor: ThreadExecutor) -> StepResult:
    await executor.launch(first_step())
    return await executor.read()


def test_the_loop_runs_on_while_a_step_is_waited_for() -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine, max_call_s=60.0)

    async def run() -> StepResult:
        call = asyncio.create_task(run_step(executor))
        await asyncio.to_thread(engine.started.wait, 10)
        await asyncio.sleep(0.01)
        assert not call.done()
        engine.gate.set()
        return await call

    (drawn,) = asyncio.run(run()).slices
    executor.close()

    assert drawn is not None
    assert [drawn[0].token_id] == fake_tokens([5, 6], PARAMS, model=MODEL)
    assert engine.thread_names == {"engine"}


def test_passes_are_recorded_in_the_thread_of_the_engine() -> None:
    engine = GatedEngine()
    answers = [True, False]

    def record_next() -> bool:
        engine.thread_names.add(threading.current_thread().name)
        return answers.pop(0)

    engine.record_next = record_next  # type: ignore[method-assign]
    executor = ThreadExecutor(engine, max_call_s=60.0)

    assert asyncio.run(executor.record_next())
    assert not asyncio.run(executor.record_next())
    executor.close()
    assert engine.thread_names == {"engine"}


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RuntimeError("the device is on fire"), "on fire"),
        (StopIteration(), "raised StopIteration"),  # which no future takes
    ],
)
def test_an_exception_propagates_and_the_next_step_works(failure: Exception, told: str) -> None:
    engine = GatedEngine()
    engine.gate.set()
    engine.failure = failure
    executor = ThreadExecutor(engine, max_call_s=60.0)

    with pytest.raises(RuntimeError, match=told):
        asyncio.run(asyncio.wait_for(run_step(executor), 10))
    engine.failure = None
    asyncio.run(run_step(executor))
    executor.close()


def test_the_exception_of_a_pass_does_not_hold_its_tensors() -> None:
    engine = GatedEngine()
    tensors: list[weakref.ref[set[int]]] = []

    def read() -> StepResult:
        tensor: set[int] = set()
        tensors.append(weakref.ref(tensor))
        raise MemoryError(len(tensor))

    engine.read = read  # type: ignore[method-assign]
    executor = ThreadExecutor(engine, max_call_s=60.0)

    with pytest.raises(MemoryError) as held:
        asyncio.run(run_step(executor))
    executor.close()

    assert held.traceback[-1].name == "read"
    assert [each() for each in tensors] == [None]


@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_a_read_waits_for_the_step_that_writes_pages(times: int) -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine, max_call_s=60.0)

    async def run() -> None:
        call = asyncio.create_task(run_step(executor))
        await asyncio.to_thread(engine.started.wait, 10)
        for _ in range(times):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done()
        engine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.finished == 1

    asyncio.run(run())
    executor.close()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_call_that_hangs_ends_in_time_and_none_follows_it(is_cancelled: bool) -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine, max_call_s=0.05)

    async def run() -> None:
        call = asyncio.create_task(run_step(executor))
        if is_cancelled:
            await asyncio.to_thread(engine.started.wait, 10)
            call.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineHangs):
            await call
        with pytest.raises(EngineHangs, match=r"has not returned after 0\.05 s"):
            await executor.launch(first_step())

    asyncio.run(run())
    executor.close()  # does not wait for it

    assert not engine.finished
    engine.gate.set()


def test_closing_does_not_wait_for_a_call_that_begins_to_hang() -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine, max_call_s=0.05)
    rescue = threading.Timer(5, engine.gate.set)
    rescue.start()

    async def run() -> None:
        call = asyncio.create_task(run_step(executor))
        await asyncio.to_thread(engine.started.wait, 10)
        executor.close()  # the loop cannot notice the hang meanwhile
        assert not engine.gate.is_set()
        rescue.cancel()
        engine.gate.set()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_exception_that_nobody_waits_for_is_not_reported(is_cancelled: bool) -> None:
    engine = GatedEngine()
    engine.failure = RuntimeError("the device is on fire")
    executor = ThreadExecutor(engine, max_call_s=60.0 if is_cancelled else 0.05)
    reports: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        call = asyncio.create_task(run_step(executor))
        await asyncio.to_thread(engine.started.wait, 10)
        if is_cancelled:
            call.cancel()
        else:
            await asyncio.wait([call])  # until it hangs
        engine.gate.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineHangs):
            await call
        await asyncio.to_thread(executor.close)
        await asyncio.to_thread(executor._thread.join)
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()

    assert not reports


def test_a_limit_above_all_that_a_thread_can_wait_does_not_keep_it_from_closing() -> None:
    ThreadExecutor(GatedEngine(), max_call_s=1e300).close()


def test_a_closed_executor_refuses() -> None:
    executor = ThreadExecutor(GatedEngine(), max_call_s=60.0)
    executor.close()

    with pytest.raises(EngineClosed):
        asyncio.run(executor.launch(EngineStep()))
