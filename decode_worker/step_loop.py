"""Runs the scheduler's plans on the engine, step after step. No decision is made here."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from decode_worker.errors import EngineFailed, RequestError
from decode_worker.request import PrefillGroup, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from decode_worker.step_plan import StepPlan
from llm_engine.engine_api import UNDRAWN, EngineExecutor
from observability.logs import fields

logger = logging.getLogger(__name__)


class StepLoop:
    """One task; while nothing can be computed it waits to be woken.

    Args:
        on_deltas: Takes the tokens of a step.
        on_failure: Takes each request of a pass that failed or drew no token for it.
        start_receive: Begins to ask prefill workers for a group, without waiting.
        before_step: Called when the scheduler may have changed the cache.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: EngineExecutor,
        eos_token_ids: tuple[int, ...],
        on_deltas: Callable[[Sequence[TokenDelta]], None],
        on_failure: Callable[[Request, RequestError], None],
        start_receive: Callable[[PrefillGroup], None],
        before_step: Callable[[], None],
    ) -> None:
        self.num_steps = 0
        self._scheduler = scheduler
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._on_deltas = on_deltas
        self._on_failure = on_failure
        self._start_receive = start_receive
        self._before_step = before_step
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Have the scheduler look again: something was submitted, ended, committed or freed."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            self._wake.clear()
            plan = self._scheduler.next_step()
            self._before_step()
            for group in plan.receives:
                self._start_receive(group)
            if plan.is_empty:
                await self._wake.wait()
            else:
                await self._execute(plan)

    async def _execute(self, plan: StepPlan) -> None:
        try:
            if plan.copies:
                await self._executor.copy_pages(
                    [(each.source, each.target) for each in plan.copies]
                )
            slices = plan.slices(self._eos_token_ids)
            drawn = await self._executor.forward(slices) if slices else []
        except Exception:
            # One bad pass ends the requests that were in it, not the worker.
            logger.exception("step_failed", extra=fields(tokens=plan.num_tokens))
            for request in self._scheduler.fail_step(plan):
                self._on_failure(request, EngineFailed("the pass that computed for it failed"))
        else:
            for request in self._scheduler.end_undrawn(plan, drawn):
                logger.error("no_token_drawn", extra=fields(request_id=request.request_id))
                self._on_failure(request, EngineFailed(UNDRAWN))
            self._on_deltas(self._scheduler.complete_step(plan, drawn))
        self.num_steps += 1
