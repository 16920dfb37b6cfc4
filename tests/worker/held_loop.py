"""The real step loop, for the state machines of schedulers: each call of the engine is held.

So anything may happen before a call ends: also while a plan is made and not launched, and between
two failures.
"""

import asyncio
from typing import Any

from tests.support.virtual_time import VirtualLoop
from tests.worker.held_engine import AcceleratorError, HeldExecutor
from worker.step_loop import StepLoop
from worker.wake import Wake


class HeldLoop:
    """Runs in virtual time, until it waits for the engine or for something to do.

    Args:
        loop_class: StepLoop, or one with a planted bug.
        executor: Holds the calls of the engine.
        options: The rest of what StepLoop takes.

    Attributes:
        wake: That of the step loop.
    """

    def __init__(
        self, loop_class: type[StepLoop[Any, Any, Any]], executor: HeldExecutor, **options: Any
    ) -> None:
        self._executor = executor
        self.wake = Wake()
        self._events = VirtualLoop(limit_s=1e9)
        stepping = loop_class(executor=executor, wake=self.wake, **options)
        self._running = self._events.create_task(stepping.run())

    @property
    def is_over(self) -> bool:
        """Whether the step loop has ended."""
        return self._running.done()

    @property
    def error(self) -> BaseException | None:
        """Why it has ended; None: it was stopped."""
        return None if self._running.cancelled() else self._running.exception()

    def run(self, *, is_arrival: bool = False, seconds: float = 0.0) -> None:
        """Wake it, as a request does that arrives or as anything else does, after some time.

        Raises:
            Exception: The engine was used wrongly, which the step loop takes for a failed step.
        """
        self._events.run_until_complete(self._run(is_arrival, seconds))
        if self._executor.bug is not None:
            raise self._executor.bug

    def end_call(self, how: str, *, row: int) -> None:
        """Let the call that waits end "well", "badly", or with one row "undrawn"; then `run`."""
        self._executor.let_go(
            RuntimeError("planted") if how == "badly" else None,
            undrawn=row if how == "undrawn" else None,
        )

    def lose_device(self) -> None:
        """End all calls as those of a device that is lost."""
        while not self.is_over:
            self._executor.let_go(AcceleratorError("planted"))
            self.run()

    def stop(self) -> None:
        """Stop it at the next `run`, as a worker does that ends."""
        self._running.cancel()

    def close(self) -> None:
        """End it, whatever it waits for, and forget it."""
        self._running.cancel()
        self._executor.is_closed = True
        self._events.run_until_complete(asyncio.wait([self._running]))
        self._events.close()

    async def _run(self, is_arrival: bool, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        if is_arrival:
            self.wake.set_by_arrival()
        else:
            self.wake.set()
            await asyncio.sleep(0.002)  # which ends a burst
        while not (self._executor.is_held or self.is_over or self._is_waiting()):
            await asyncio.sleep(0)

    def _is_waiting(self) -> bool:
        return not self.wake.is_set() and bool(self.wake._waiters)
