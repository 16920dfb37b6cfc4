"""Runs an engine in one thread of its own, so that the event loop never waits for a pass."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llm_engine.engine_api import EngineLike
from llm_engine.errors import EngineClosed
from llm_engine.sampling import Drawn, SequenceSlice

Result = TypeVar("Result")


class ThreadExecutor:
    """Calls run one after the other, in the order in which they were made; exceptions propagate.

    A pass that has begun cannot be stopped: cancelling a call waits for its end, so that the
    pages it writes can be handed out again when the call has returned, whatever the outcome.
    """

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._closed = False

    @property
    def engine(self) -> EngineLike:
        return self._engine

    async def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        return await self._run(lambda: self._engine.forward(slices))

    async def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        def copy_in_order() -> None:
            for source, target in copies:
                self._engine.storage.copy_page(source, target)

        await self._run(copy_in_order)

    def close(self) -> None:
        """End the thread after the call that runs; those still queued are cancelled."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise EngineClosed("the executor was closed; make a new one")
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
