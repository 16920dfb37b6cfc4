"""Runs an engine in one separate thread, so that the event loop never waits for a pass."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from llm_engine.engine_api import EngineLike
from llm_engine.engine_step import EngineStep, StepResult
from pagewire.protos.call_tasks import mark_seen
from worker.errors import EngineClosed, EngineHangs

Result = TypeVar("Result")


class EngineExecutor(Protocol):
    """Runs an engine beside the event loop: in a thread in service, in virtual time in tests."""

    @property
    def engine(self) -> EngineLike: ...

    async def launch(self, step: EngineStep) -> None:
        """Do what EngineLike.launch does."""
        ...

    async def read(self) -> StepResult:
        """Do what EngineLike.read does."""
        ...


class ThreadExecutor:
    """Runs calls one after the other, in the order in which they were made; exceptions propagate.

    A call that has begun cannot be stopped: cancelling waits for its end. A cancelled read has
    still read its step, whose pages can then be handed out again.

    Args:
        max_call_s: A call that takes longer hangs. It and all later ones raise EngineHangs: only
            the end of the process frees the device and its pages.
    """

    def __init__(self, engine: EngineLike, *, max_call_s: float) -> None:
        self._engine = engine
        self._max_call_s = max_call_s
        self._hangs = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._closed = False

    @property
    def engine(self) -> EngineLike:
        return self._engine

    async def launch(self, step: EngineStep) -> None:
        await self._run(lambda: self._engine.launch(step))

    async def read(self) -> StepResult:
        return await self._run(self._engine.read)

    def close(self) -> None:
        """End the thread after the running call, unless that hangs; cancel queued calls."""
        self._closed = True
        self._pool.shutdown(wait=not self._hangs, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise EngineClosed("the executor was closed; make a new one")
        if self._hangs:
            raise self._hanging()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, work)
        future.add_done_callback(mark_seen)  # nobody reads one that was cancelled, or hung
        deadline = loop.time() + self._max_call_s
        try:
            await asyncio.wait([future], timeout=self._max_call_s)
        except asyncio.CancelledError:
            await asyncio.wait([future], timeout=deadline - loop.time())
            self._hangs = not future.done()
            raise
        self._hangs = not future.done()
        if self._hangs:
            raise self._hanging()
        return future.result()

    def _hanging(self) -> EngineHangs:
        return EngineHangs(f"a call of the engine has not returned after {self._max_call_s:g} s")
