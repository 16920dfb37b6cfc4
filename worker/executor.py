"""Runs an engine in one separate thread, so that the event loop never waits for a pass."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import TIMEOUT_MAX, Thread
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar

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

    async def record_next(self) -> bool:
        """Do what EngineLike.record_next does."""
        ...


class ThreadExecutor:
    """Runs calls one after the other, in the order in which they were made; exceptions propagate.

    A call that has begun cannot be stopped: cancelling it, also repeatedly, waits for its end. A
    cancelled read has still read its step, whose pages can then be handed out again.

    The thread begins when the event loop lets go of the interpreter's lock, so little is done after
    a call is queued, and little before its outcome is read. With a ThreadPoolExecutor and
    asyncio.wait a launch of an idle worker began 0.1 ms later.

    Args:
        max_call_s: A call that takes longer hangs. It and all later ones raise EngineHangs: only
            the end of the process frees the device and its pages.
    """

    def __init__(self, engine: EngineLike, *, max_call_s: float) -> None:
        self._engine = engine
        self._max_call_s = max_call_s
        self._hangs = False
        self._closed = False
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()  # None: no more come
        # A daemon: a call that hangs must not keep the process from ending.
        self._thread = Thread(target=_run_calls, args=(self._calls,), name="engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> EngineLike:
        return self._engine

    async def launch(self, step: EngineStep) -> None:
        await self._run(lambda: self._engine.launch(step))

    async def read(self) -> StepResult:
        return await self._run(self._engine.read)

    async def record_next(self) -> bool:
        return await self._run(self._engine.record_next)

    def close(self) -> None:
        """End the thread after the calls made so far; wait for that, but for none that hangs."""
        self._closed = True
        self._calls.put(None)
        if not self._hangs:
            # A call may begin to hang only now. No thread can wait longer than TIMEOUT_MAX.
            self._thread.join(min(self._max_call_s, TIMEOUT_MAX))

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise EngineClosed("the executor was closed; make a new one")
        if self._hangs:
            raise self._hanging()
        call = _Call(work)
        limit = asyncio.get_running_loop().call_later(self._max_call_s, self._hang, call)
        self._calls.put(call)
        try:
            return await call.outcome
        except asyncio.CancelledError:
            await call.wait_over()
            raise
        finally:
            limit.cancel()

    def _hang(self, call: "_Call[Any]") -> None:
        if not call.is_over:
            self._hangs = True
            call.fail(self._hanging())

    def _hanging(self) -> EngineHangs:
        return EngineHangs(f"a call of the engine has not returned after {self._max_call_s:g} s")


class _Call(Generic[Result]):
    """One call. It belongs to the event loop that makes it, except for `run`.

    Attributes:
        outcome: What it returned or raised; cancelled if its maker is.
        is_over: It has ended, or hangs.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self.outcome = self._make_outcome()
        self.is_over = False

    def run(self) -> None:
        """Do the work, in the engine's thread, and tell the loop."""
        try:
            result = self._work()
        except StopIteration as error:  # no future takes it, and its maker would wait for ever
            told = RuntimeError("a call of the engine raised StopIteration")
            told.__cause__ = error
            self._tell(partial(self.fail, told))
        except BaseException as error:
            # Else it would hold the tensors of a failed pass, while that is computed in halves.
            clear_frames(error.__traceback__)
            self._tell(partial(self.fail, error))
        else:
            self._tell(partial(self._succeed, result))

    def fail(self, error: BaseException) -> None:
        """Note that it raised, or hangs; the first outcome counts."""
        if self._ends():
            self.outcome.set_exception(error)

    async def wait_over(self) -> None:
        """Return when it is over, however often the maker is cancelled; for one that was."""
        while not self.is_over:
            self.outcome = self._make_outcome()
            with suppress(asyncio.CancelledError):  # the maker raises its first one
                await asyncio.wait([self.outcome])

    def _succeed(self, result: Result) -> None:
        if self._ends():
            self.outcome.set_result(result)

    def _ends(self) -> bool:
        """Note the end; return whether somebody waits for the outcome."""
        is_first = not self.is_over
        self.is_over = True
        return is_first and not self.outcome.done()  # it is if its maker was cancelled just now

    def _tell(self, end: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(end)

    def _make_outcome(self) -> "asyncio.Future[Result]":
        outcome: asyncio.Future[Result] = self._loop.create_future()
        outcome.add_done_callback(mark_seen)  # nobody reads one that was cancelled, or hung
        return outcome


def _run_calls(calls: "SimpleQueue[_Call[Any] | None]") -> None:
    for call in iter(calls.get, None):
        call.run()
        del call  # and its result, while no other comes
