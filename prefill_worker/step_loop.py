"""Runs the scheduler's plans on the engine, step after step. No decision is made here."""

import asyncio
import logging
from collections.abc import Callable

from llm_engine.engine_api import UNDRAWN, EngineExecutor
from observability.logs import fields
from prefill_worker.request import Progress, Prompt
from prefill_worker.scheduler import Scheduler
from prefill_worker.step_plan import StepPlan

logger = logging.getLogger(__name__)


class StepLoop:
    """One task; while nothing can be computed it waits to be woken.

    Args:
        on_progress: Takes finished pages and first tokens, in order.
        on_failure: Takes each prompt of a pass that failed or drew no token for it, and why.
        before_step: Called when the scheduler may have changed the cache.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: EngineExecutor,
        eos_token_ids: tuple[int, ...],
        on_progress: Callable[[Progress], None],
        on_failure: Callable[[Prompt, str], None],
        before_step: Callable[[], None],
    ) -> None:
        self.num_steps = 0
        self._scheduler = scheduler
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._before_step = before_step
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Have the scheduler look again: something was submitted, ended or freed."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            self._wake.clear()
            plan = self._scheduler.next_step()
            self._before_step()
            for ready in plan.ready:
                self._on_progress(ready)
            if plan.chunks:
                await self._execute(plan)
            else:
                await self._wake.wait()

    async def _execute(self, plan: StepPlan) -> None:
        try:
            drawn = await self._executor.forward(plan.slices(self._eos_token_ids))
        except Exception:
            # One bad pass ends the prompts that were in it, not the worker.
            logger.exception("step_failed", extra=fields(tokens=plan.num_tokens))
            for prompt in self._scheduler.fail_step(plan):
                self._on_failure(prompt, "the pass that computed for it failed")
        else:
            for prompt in self._scheduler.end_undrawn(plan, drawn):
                logger.error("no_token_drawn", extra=fields(request_id=prompt.request_id))
                self._on_failure(prompt, UNDRAWN)
            for progress in self._scheduler.complete_step(plan, drawn):
                self._on_progress(progress)
        self.num_steps += 1
