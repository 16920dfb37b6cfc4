import asyncio
import threading
from collections.abc import Sequence

import pytest

from llm_engine.errors import EngineClosed
from llm_engine.executor import ThreadExecutor
from llm_engine.fake_engine import FakeEngine, FakeModel, fake_tokens
from llm_engine.sampling import Draw, SampledToken, SamplingParams, SequenceSlice

MODEL = FakeModel()
PARAMS = SamplingParams(max_tokens=1)


def first_slice() -> SequenceSlice:
    draw = Draw(params=PARAMS, seed=0, position=2, prompt_token_ids=[5, 6], output_token_ids=[])
    return SequenceSlice(
        token_ids=[5, 6], start=0, page_ids=[0], num_prompt_tokens=2, draws=(draw,)
    )


class GatedEngine(FakeEngine):
    """A pass that ends only when the test lets it; fails if it is told to."""

    def __init__(self) -> None:
        super().__init__(MODEL, num_pages=4, page_size=4)
        self.gate = threading.Event()
        self.started = threading.Event()
        self.thread_names: set[str] = set()
        self.failure: Exception | None = None
        self.finished = 0

    def forward(self, slices: Sequence[SequenceSlice]) -> list[tuple[SampledToken, ...]]:
        self.started.set()
        assert self.gate.wait(10)
        self.thread_names.add(threading.current_thread().name)
        if self.failure is not None:
            raise self.failure
        self.finished += 1
        return super().forward(slices)


def test_the_loop_runs_on_while_a_pass_computes() -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine)

    async def run() -> list[tuple[SampledToken, ...]]:
        call = asyncio.create_task(executor.forward([first_slice()]))
        await asyncio.sleep(0.01)
        assert not call.done()
        engine.gate.set()
        return await call

    (drawn,) = asyncio.run(run())
    executor.close()

    assert [drawn[0].token_id] == fake_tokens([5, 6], PARAMS, model=MODEL)
    assert engine.thread_names == {"engine_0"}


def test_an_exception_propagates_and_the_next_pass_works() -> None:
    engine = GatedEngine()
    engine.gate.set()
    engine.failure = RuntimeError("the device is on fire")
    executor = ThreadExecutor(engine)

    with pytest.raises(RuntimeError, match="on fire"):
        asyncio.run(executor.forward([first_slice()]))
    engine.failure = None
    asyncio.run(executor.forward([first_slice()]))
    executor.close()


def test_cancelling_a_call_waits_for_the_pass_that_writes_pages() -> None:
    engine = GatedEngine()
    executor = ThreadExecutor(engine)

    async def run() -> None:
        call = asyncio.create_task(executor.forward([first_slice()]))
        await asyncio.to_thread(engine.started.wait, 10)
        call.cancel()
        await asyncio.sleep(0.01)
        assert not call.done()
        engine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.finished == 1

    asyncio.run(run())
    executor.close()


def test_pages_are_copied_in_order_and_a_closed_executor_refuses() -> None:
    engine = GatedEngine()
    engine.gate.set()
    executor = ThreadExecutor(engine)
    asyncio.run(executor.forward([first_slice()]))

    asyncio.run(executor.copy_pages([(0, 1), (1, 2)]))
    executor.close()

    assert engine.storage.slots[2].any()
    assert (engine.storage.slots[2] == engine.storage.slots[0]).all()
    with pytest.raises(EngineClosed):
        asyncio.run(executor.copy_pages([]))
