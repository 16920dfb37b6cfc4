"""Runs a fake engine in virtual time: a pass takes as long as its tokens cost."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import SequenceSlice
from tests.support.fake_engine import FakeEngine, FakePageStorage

LAUNCH_S = 0.0005  # of the host


class AcceleratorError(RuntimeError):
    """Named as torch's: an error that costs the process its device."""


class VirtualExecutor:
    """Implements worker.executor.EngineExecutor as ThreadExecutor does, without its thread.

    Steps run one after the other beside their caller. A step reads and writes its pages at its end,
    so pages that are given away or overwritten between its launch and its end change the tokens.
    `num_failing_passes` makes that many of the next steps fail at their end, `is_broken` all, and
    `num_failing_launches` that many at their launch. A step fails that computes for a prompt which
    holds the token `toxin`; if that `is_deadly`, the engine is broken from then on. Nothing can be
    drawn for a prompt that holds `poison`, as where activations overflow. While `may_end` is not
    set, steps hang.
    """

    def __init__(
        self, engine: FakeEngine, *, pass_s: float = 0.01, token_s: float = 0.0001
    ) -> None:
        self.fake_engine = engine
        self._pass_s = pass_s
        self._token_s = token_s
        self._running: deque[asyncio.Task[StepResult]] = deque()  # not read, oldest first
        self.num_failing_passes = 0
        self.num_failing_launches = 0
        self.is_broken = False
        self.toxin: int | None = None  # a token id
        self.is_deadly = False
        self.poison: int | None = None  # a token id
        self.slowdown = 1.0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.passes: list[int] = []  # tokens of each step
        self.computed_for: list[set[tuple[int, ...]]] = []  # prompts of each step that drew

    @property
    def engine(self) -> FakeEngine:
        return self.fake_engine

    @property
    def storage(self) -> FakePageStorage:
        return self.fake_engine.storage

    @property
    def num_unread(self) -> int:
        """Return how many steps are launched and not read."""
        return len(self._running)

    async def launch(self, step: EngineStep) -> None:
        num_tokens = len(step.decodes) + sum(len(each.token_ids) for each in step.slices)
        self.passes.append(num_tokens)
        await asyncio.sleep(LAUNCH_S * self.slowdown)
        if self.num_failing_launches:
            self.num_failing_launches -= 1
            raise RuntimeError("injected failure of a launch")
        self.fake_engine.launch(step)
        before = self._running[-1] if self._running else None
        seconds = self._pass_s + num_tokens * self._token_s
        run = self._run(step, before, seconds)
        self._running.append(asyncio.get_running_loop().create_task(run))

    async def read(self) -> StepResult:
        task = self._running[0]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():  # a step that has begun cannot be stopped
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            raise
        finally:
            self._running.popleft()

    async def record_next(self) -> bool:
        return self.fake_engine.record_next()

    async def _run(
        self, step: EngineStep, before: "asyncio.Task[StepResult] | None", seconds: float
    ) -> StepResult:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(seconds * self.slowdown)
        await self.may_end.wait()
        num_computed_tokens = self.fake_engine.num_computed_tokens
        result = self.fake_engine.read()  # also of a step that fails: its seats mean nothing then
        decoded = [self.fake_engine.prompts[seat] for seat in step.decodes]
        drawn = [tuple(draw.prompt_token_ids) for each in step.slices for draw in each.draws]
        self.computed_for.append({*decoded, *drawn})
        try:
            self._fail(step, decoded)
        except RuntimeError:
            self.fake_engine.num_computed_tokens = num_computed_tokens
            raise
        return replace(
            result,
            decodes=[
                None if self.poison in prompt else token
                for prompt, token in zip(decoded, result.decodes, strict=True)
            ],
            slices=[
                None if any(self.poison in draw.prompt_token_ids for draw in each.draws) else tokens
                for each, tokens in zip(step.slices, result.slices, strict=True)
            ],
        )

    def _fail(self, step: EngineStep, decoded: Sequence[tuple[int, ...]]) -> None:
        if self.is_broken:
            raise RuntimeError("injected: the engine is broken")
        if self.num_failing_passes:
            self.num_failing_passes -= 1
            raise RuntimeError("injected failure of a step")
        toxin = self.toxin
        if toxin is None:
            return
        if any(toxin in each for each in decoded) or any(_holds(s, toxin) for s in step.slices):
            if self.is_deadly:
                self.is_broken = True
                raise AcceleratorError("injected: a step has cost the device")
            raise RuntimeError("injected: a step met a toxin")


def _holds(each: SequenceSlice, token_id: int) -> bool:
    """Whether a slice is of a prompt with this token, as far as the slice tells."""
    of_prompt = each.token_ids[: max(0, each.num_prompt_tokens - each.start)]
    return token_id in of_prompt or any(token_id in draw.prompt_token_ids for draw in each.draws)
