"""Runs a scheduler's plans on the engine, step after step. No decision is made here.

Life of a step:
1. plan     the scheduler decides what to compute; work that needs no engine begins at once
2. launch   the engine begins the step; where it runs beside the host, the next step is planned and
            launched meanwhile, unless requests are just arriving
3. read     the step has ended, and its tokens are known
4. settle   the scheduler gets the drawn tokens, and the pool the outcome

After a failed step:
5. drop     steps launched behind it are read and discarded
6. judge    an engine that no longer computes ends the worker
7. again    otherwise each half of its requests gets a separate step, and the dropped steps follow,
            one at a time; this isolates the request that fails alone, and all others lose nothing
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from llm_engine.device_errors import is_device_lost
from llm_engine.engine_api import UNDRAWN
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.kv_reads import NO_READS
from llm_engine.sampling import SequenceSlice
from observability.logs import fields
from worker.errors import (
    EngineFailed,
    EngineHangs,
    EngineLost,
    Failing,
    PassFailed,
    WorkerError,
)
from worker.executor import EngineExecutor
from worker.wake import Wake

logger = logging.getLogger(__name__)

# Without a step, before passes are recorded: requests that come in turns wait for no recording
IDLE_S = 0.5
CHECK_S = 5.0  # without a step, before the engine is asked whether it still has its device


class Work(Protocol):
    """A request or a prompt that a step computes for."""

    @property
    def request_id(self) -> str: ...


PlanT = TypeVar("PlanT", bound="StepPlan")
WorkT = TypeVar("WorkT", bound=Work)
ProgressT = TypeVar("ProgressT")
ProgressT_co = TypeVar("ProgressT_co", covariant=True)
PlanT_contra = TypeVar("PlanT_contra", bound="StepPlan", contravariant=True)
WorkT_co = TypeVar("WorkT_co", bound=Work, covariant=True)
WorkT_contra = TypeVar("WorkT_contra", bound=Work, contravariant=True)
ProgressT_contra = TypeVar("ProgressT_contra", contravariant=True)


class StepPlan(Protocol):
    """The plan of one engine step."""

    @property
    def is_empty(self) -> bool:
        """Whether the engine has nothing to do."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether the next plan may compute more even if nothing changes until then."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        ...

    @property
    def request_ids(self) -> Sequence[str]:
        """Of the requests that the pass computes for, each once."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether no other step may be in flight with it."""
        ...

    def engine_step(self, eos_token_ids: tuple[int, ...], *, is_again: bool) -> EngineStep:
        """Return what the engine does; it stays as it is until the step is settled.

        Args:
            is_again: A step may have failed since it was planned, so seats are invalid.
        """
        ...

    def halves(self: PlanT) -> Sequence[PlanT]:
        """Return two plans, one for each half of the requests; none for a single request."""
        ...


class Scheduler(Protocol[PlanT, WorkT_co, ProgressT_co]):
    """Decides what each step computes; from a plan to its report the plan's pages are fixed.

    Plans are settled in the order in which they were made; later plans may exist by then. The
    halves of a plan may be settled one after the other in its place.
    """

    def next_step(self) -> PlanT:
        """Return what the next step computes; the plan may be empty."""
        ...

    def end_undrawn(self, plan: PlanT, result: StepResult) -> Sequence[WorkT_co]:
        """End the items for which no token could be drawn, and return them."""
        ...

    def complete_step(self, plan: PlanT, result: StepResult) -> Sequence[ProgressT_co]:
        """Apply what a plan's step drew, after `end_undrawn`."""
        ...

    def fail_step(self, plan: PlanT) -> Sequence[WorkT_co]:
        """End all items that took part in a failed step, and return them."""
        ...


class StepListener(Protocol[PlanT_contra, WorkT_contra, ProgressT_contra]):
    """A pool's reactions to the outcome of steps."""

    def planned(self, plan: PlanT_contra) -> None:
        """Begin the plan's work that needs no engine; must not wait."""
        ...

    def progressed(self, progress: Sequence[ProgressT_contra]) -> None:
        """Take the progress of a step."""
        ...

    def failed(self, work: WorkT_contra, error: WorkerError) -> None:
        """Report an item that the scheduler has ended to its caller."""
        ...


@dataclass(frozen=True, slots=True)
class _Launch:
    """A step that has been launched and has not ended."""

    at: float  # loop time, seconds
    is_ahead: bool  # an older one was not settled


# Yields a pass that serves no request, and keeps it valid; None: there is no page for it.
MakeProbe = Callable[[], AbstractContextManager[SequenceSlice | None]]


class StepLoop(Generic[PlanT, WorkT, ProgressT]):
    """One task; while nothing can be computed it records passes, and later asks after the device.

    Args:
        scheduler: Makes plans and takes their outcome.
        listener: Receives plans, progress and failures.
        before_step: Called when the scheduler may have changed the cache.
        wake: Set when the scheduler may have something new to plan.
        make_probe: Makes a pass that shows whether the engine still computes.
        max_failed_passes: Failed passes in a row, probes included, before the engine is lost.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler[PlanT, WorkT, ProgressT],
        listener: StepListener[PlanT, WorkT, ProgressT],
        executor: EngineExecutor,
        eos_token_ids: tuple[int, ...],
        before_step: Callable[[], None],
        wake: Wake,
        make_probe: MakeProbe,
        max_failed_passes: int,
    ) -> None:
        self.num_steps = 0  # that succeeded
        self.num_steps_ahead = 0  # of num_steps, launched while an older one was not settled
        self.num_steps_alone = 0  # of num_steps, beside no other, as a request's pass had failed
        self.reads = NO_READS  # of attention, in steps that succeeded
        self._scheduler = scheduler
        self._listener = listener
        self._executor = executor
        self._eos_token_ids = eos_token_ids
        self._before_step = before_step
        self._wake = wake
        self._make_probe = make_probe
        self._max_failed_passes = max_failed_passes
        self._num_failed = 0  # passes since the last that succeeded
        self._unsettled: deque[PlanT] = deque()  # oldest first
        self._launched: deque[_Launch] = deque()  # of them, the oldest
        self._read_at = 0.0  # when the last step ended, or the loop began
        self._records = True  # passes while nothing is to be computed, until all are or one fails

    @property
    def is_stepping(self) -> bool:
        """Whether a step has been launched that has not ended."""
        return bool(self._launched)

    async def run(self) -> None:
        """Step until cancelled; launched steps then end, and their results are dropped.

        Raises:
            EngineLost: The engine no longer computes.
        """
        self._read_at = asyncio.get_running_loop().time()
        try:
            while True:
                if self._unsettled and self._wake.is_in_burst:
                    await self._settle_oldest()  # meanwhile more arrive for the next step
                    continue
                self._wake.clear()
                plan = self._scheduler.next_step()
                self._before_step()
                self._listener.planned(plan)
                if not plan.is_empty:
                    await self._begin(plan)
                elif self._unsettled:
                    await self._settle_oldest()
                elif plan.is_partial:
                    await asyncio.sleep(0)
                elif self._records:
                    if not await self._is_woken_by(self._read_at + IDLE_S):
                        await self._record_next()
                elif not await self._is_woken_by(self._read_at + CHECK_S):
                    await self._check()
        finally:
            await self._drop_launched()
            for plan in self._unsettled:
                self._scheduler.fail_step(plan)

    async def _is_woken_by(self, moment: float) -> bool:
        try:
            async with asyncio.timeout_at(moment):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _record_next(self) -> None:
        """Record one pass: new work waits for no more than that."""
        try:
            self._records = await self._executor.record_next()
        except Exception as error:
            self._records = False  # all others are recorded when they come
            logger.error("recording_failed", exc_info=error)
            await self._judge(error)

    async def _check(self) -> None:
        """Run an empty step: without requests, nothing else would show that the device is lost."""
        try:
            await self._launch(EngineStep())
            await self._read()
        except Exception as error:
            logger.error("check_failed", exc_info=error)
            await self._judge(error)

    async def _begin(self, plan: PlanT) -> None:
        """Launch a plan, and settle the plans that must be settled before the next is made."""
        is_alone = plan.is_alone
        if is_alone:
            try:
                await self._settle_down_to(0)
            except BaseException:
                self._scheduler.fail_step(plan)  # the loop ends: no other would give its pages back
                raise
        self._unsettled.append(plan)
        try:
            await self._launch(
                # Since an alone one was planned, older ones may have begun its seats anew.
                plan.engine_step(self._eos_token_ids, is_again=is_alone),
                is_ahead=len(self._unsettled) > 1,
            )
        except Exception as error:
            await self._settle_down_to(1)
            if self._unsettled:  # else an older plan failed too, and this one was computed again
                await self._recover(error)
        most = 0 if is_alone else self._executor.engine.max_launched - 1
        await self._settle_down_to(most)

    async def _settle_down_to(self, num_plans: int) -> None:
        while len(self._unsettled) > num_plans:
            await self._settle_oldest()

    async def _settle_oldest(self) -> None:
        was_ahead = self._launched[0].is_ahead
        try:
            result = await self._read()
        except Exception as error:
            await self._recover(error)
        else:
            self.num_steps_ahead += was_ahead
            self._settle(self._unsettled.popleft(), result)

    async def _launch(self, step: EngineStep, *, is_ahead: bool = False) -> None:
        # At once: a cancelled launch has happened all the same.
        self._launched.append(_Launch(asyncio.get_running_loop().time(), is_ahead))
        try:
            await self._executor.launch(step)
        except Exception:
            self._launched.pop()
            raise

    async def _read(self) -> StepResult:
        try:
            result = await self._executor.read()
        finally:
            # Also when cancelled: its executor has waited for the end. A step that was launched
            # behind another one begins when that one ends.
            began_at = max(self._launched.popleft().at, self._read_at)
            self._read_at = asyncio.get_running_loop().time()
        return replace(result, seconds=self._read_at - began_at)

    async def _drop_launched(self) -> Exception | None:
        """Wait until no step writes any more: only then may pages be handed out again.

        Returns:
            The first error after which the engine no longer computes.
        """
        fatal = None
        while self._launched:
            try:
                await self._read()
            except Exception as error:
                if fatal is None and _blame(error) is not None:
                    fatal = error
        return fatal

    async def _recover(self, error: Exception) -> None:
        """After the oldest plan failed, compute it in halves, and repeat all later plans."""
        fatal = await self._drop_launched()
        await self._halve(fatal or error)
        while self._unsettled:
            plan = self._unsettled[0]
            try:
                await self._launch(plan.engine_step(self._eos_token_ids, is_again=True))
                result = await self._read()
            except Exception as error:
                await self._halve(error)
            else:
                self._settle(self._unsettled.popleft(), result)

    async def _halve(self, error: Exception) -> None:
        """Replace the oldest plan, which failed, with its halves; end it if it has none."""
        failed = self._unsettled[0]
        logger.error(
            "pass_failed",
            exc_info=error,
            extra=fields(tokens=failed.num_tokens, request_ids=",".join(failed.request_ids)),
        )
        await self._judge(error)
        plan = self._unsettled.popleft()
        halves = plan.halves()
        self._unsettled.extendleft(reversed(halves))
        if not halves:
            self._fail(plan, PassFailed("the pass that computed for it failed"))

    def _settle(self, plan: PlanT, result: StepResult) -> None:
        self._num_failed = 0
        self.num_steps += 1
        self.num_steps_alone += plan.is_alone
        self.reads += result.reads
        for work in self._scheduler.end_undrawn(plan, result):
            logger.error("no_token_drawn", extra=fields(request_id=work.request_id))
            self._listener.failed(work, EngineFailed(UNDRAWN))
        self._listener.progressed(self._scheduler.complete_step(plan, result))

    def _fail(self, plan: PlanT, error: WorkerError) -> None:
        for work in self._scheduler.fail_step(plan):
            self._listener.failed(work, error)

    async def _judge(self, error: Exception) -> None:
        """Return if the engine still computes; otherwise end all requests and raise EngineLost."""
        self._num_failed += 1
        reason: WorkerError | None = _blame(error)
        while reason is None and self._num_failed < self._max_failed_passes:
            try:
                computes = await self._probe()
            except Exception as failure:
                logger.exception("probe_failed")
                self._num_failed += 1
                reason = _blame(failure)
            else:
                if computes:
                    self._num_failed = 0
                return
        reason = reason or Failing("the engine of this worker fails")
        while self._unsettled:
            self._fail(self._unsettled.popleft(), reason)
        raise EngineLost(f"{type(error).__name__}: {error}") from error

    async def _probe(self) -> bool:
        """Compute one token; return False if there is no page for one."""
        with self._make_probe() as probe:
            if probe is None:
                return False
            await self._launch(EngineStep(slices=(probe,)))
            await self._read()
            return True


def _blame(error: Exception) -> PassFailed | None:
    """Return what all are told that took part in a step which may have ended the engine, if any."""
    if is_device_lost(error):
        return PassFailed("the pass that computed for it lost the device")
    if isinstance(error, EngineHangs):
        return PassFailed("the pass that computed for it has not ended")
    return None
