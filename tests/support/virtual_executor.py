"""Runs a fake engine in virtual time: a pass takes as long as its tokens cost."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from llm_engine.fake_engine import FakeEngine, FakePageStorage
from llm_engine.sampling import Drawn, SequenceSlice

Result = TypeVar("Result")


class VirtualExecutor:
    """Implements engine_api.EngineExecutor as ThreadExecutor does, without its thread.

    A pass reads and writes its pages at its end, so pages that are given away or overwritten while
    it runs change the tokens. `num_failing_passes` makes that many of the next passes raise.
    Nothing can be drawn for a prompt that holds `poison`, as where activations overflow.
    """

    def __init__(
        self, engine: FakeEngine, *, pass_s: float = 0.01, token_s: float = 0.0001
    ) -> None:
        self.fake_engine = engine
        self._pass_s = pass_s
        self._token_s = token_s
        self._turn = asyncio.Lock()
        self.num_failing_passes = 0
        self.poison: int | None = None  # a token id
        self.slowdown = 1.0
        self.passes: list[int] = []  # tokens of each pass

    @property
    def engine(self) -> FakeEngine:
        return self.fake_engine

    @property
    def storage(self) -> FakePageStorage:
        return self.fake_engine.storage

    async def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        num_tokens = sum(len(each.token_ids) for each in slices)
        self.passes.append(num_tokens)

        def compute() -> list[Drawn]:
            if self.num_failing_passes:
                self.num_failing_passes -= 1
                raise RuntimeError("injected failure of a pass")
            drawn = self.fake_engine.forward(slices)
            return [
                None if any(self.poison in draw.prompt_token_ids for draw in each.draws) else tokens
                for each, tokens in zip(slices, drawn, strict=True)
            ]

        return await self._run(compute, self._pass_s + num_tokens * self._token_s)

    async def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        def copy_in_order() -> None:
            for source, target in copies:
                self.fake_engine.storage.copy_page(source, target)

        await self._run(copy_in_order, self._token_s)

    async def _run(self, work: Callable[[], Result], seconds: float) -> Result:
        task = asyncio.get_running_loop().create_task(self._timed(work, seconds))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])  # a pass that has begun cannot be stopped
            if not task.cancelled():
                task.exception()
            raise

    async def _timed(self, work: Callable[[], Result], seconds: float) -> Result:
        async with self._turn:
            await asyncio.sleep(seconds * self.slowdown)
            return work()
