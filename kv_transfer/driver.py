"""Runs one pure state machine of a transfer: queues its events, arms its deadlines.

`Receiver` and `Sender` each own a Driver and give it their machine and a function that executes
one action; their owners call the driver for what both have in common. The driver's task starts with
the first event and ends when the machine is finished, which after a failure can be later than the
outcome: the machine first becomes quiescent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.deadlines import Wait
from kv_transfer.errors import ConnectionBroken, TransferAborted
from kv_transfer.protocol import Cancelled, DeadlinePassed, Failure, Send, StreamLost
from pagewire.protos.call_tasks import is_own_cancellation

State = TypeVar("State", bound="MachineState")
Event = TypeVar("Event")
Action = TypeVar("Action")
T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs a function that may take long: `asyncio.to_thread`; in virtual time `run_inline`."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


async def run_inline(function: Callable[[], T], /) -> T:
    """Run the function at once: for tests in virtual time, where threads have no place."""
    return function()


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """The amounts that one attempt moved."""

    pages_moved: int = 0
    bytes_moved: int = 0
    wire_s: float = 0.0  # time in which a send or receive was posted


class MachineState(Protocol):
    """The parts of a state that the driver reads."""

    @property
    def failure(self) -> Failure | None: ...

    @property
    def is_ended(self) -> bool: ...

    @property
    def is_quiescent(self) -> bool: ...

    @property
    def is_stuck(self) -> bool: ...

    @property
    def is_finished(self) -> bool: ...


class Driver(Generic[State, Event, Action]):
    """One attempt's event loop task. Actions are executed in order, each before the next event."""

    def __init__(
        self,
        *,
        state: State,
        step: Callable[[State, Any], tuple[State, tuple[Action, ...]]],
        waiting_for: Callable[[State], Wait | None],
        seconds: Callable[[Wait], float],
        execute: Callable[[Action], Awaitable[None]],
    ) -> None:
        self.state = state
        self._step = step
        self._waiting_for = waiting_for
        self._seconds = seconds
        self._execute = execute
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stuck: asyncio.Future[None] | None = None  # done when the machine got stuck
        self._jobs: set[asyncio.Task[None]] = set()
        self._cause: Exception | None = None  # the local cause of the machine's failure, if any
        self._bug: Exception | None = None  # a callback of the caller raised

    def start(self) -> None:
        """Start the task; later calls do nothing."""
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._stuck = loop.create_future()
            self._task = loop.create_task(self._run())

    def post(self, event: Event | Cancelled | StreamLost) -> None:
        """Hand an event to the machine; after its end nothing is kept."""
        self.start()
        assert self._task is not None
        if not self._task.done():
            self._events.put_nowait(event)

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a job in the background; it reports by posting an event."""
        task = asyncio.get_running_loop().create_task(self._guard(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        # Python warns of a job that was cancelled before it began, unless it is closed.
        task.add_done_callback(lambda _: job.close())
        return task

    async def outcome(self) -> None:
        """Return when the attempt succeeded.

        Raises:
            TransferError: When it failed. Pages may still be posted: see wait_quiescent.
        """
        self.start()
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self.post(Cancelled("cancelled"))
            raise
        if self._bug is not None:
            raise self._bug
        if not self.state.is_ended:
            raise TransferAborted("the event loop is shutting down")
        if self.state.failure is not None:
            raise self.state.failure.error() from self._cause

    def stream_lost(self, detail: str) -> None:
        """Note that the Prefill stream ended: no more messages will come."""
        self.post(StreamLost(detail))

    async def cancel(self, reason: str) -> None:
        """Give up; return when the other side knows."""
        self.post(Cancelled(reason))
        await self._ended.wait()

    @property
    def is_quiescent(self) -> bool:
        """True when no posted operation may still touch a page."""
        return self.state.is_quiescent

    async def wait_quiescent(self) -> None:
        """Return when no posted operation may still touch a page.

        Raises:
            ConnectionBroken: When the transport's abort did not return in time. The pages must not
                be reused until it does, if ever: see call_when_quiescent.
        """
        if self._task is not None and self._stuck is not None:
            # The machine must reach its end even if no caller waits for it.
            await asyncio.wait({self._task, self._stuck}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
        if not self.state.is_quiescent:
            raise ConnectionBroken("abort did not return in time; restart this worker")

    def call_when_quiescent(self, callback: Callable[[], None]) -> None:
        """After wait_quiescent: call back at once, or when an overdue abort returns, or never."""

        def when_over(_: object) -> None:
            if self.state.is_quiescent:
                callback()

        if self._task is None or self._task.done():
            when_over(None)
        else:
            self._task.add_done_callback(when_over)

    async def _run(self) -> None:
        try:
            await self._until_finished()
        except Exception as error:
            self._bug = error
            raise
        finally:
            self._ended.set()
            # A hanging abort goes on: cancelling it would not help.
            if self.state.is_quiescent:
                for job in self._jobs:
                    job.cancel()
        if self._jobs and self.state.is_quiescent:
            await asyncio.wait(self._jobs, timeout=1.0)

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as error:
            self._fail_locally(error)

    def _fail_locally(self, error: Exception) -> None:
        self._cause = self._cause or error
        self._events.put_nowait(StreamLost(f"{type(error).__name__}: {error}"))

    async def _until_finished(self) -> None:
        loop = asyncio.get_running_loop()
        armed: Wait | None = None
        deadline = 0.0
        while not self.state.is_finished:
            if self.state.is_stuck:
                await self._apply(await self._next_when_stuck())
                continue
            wait = self._waiting_for(self.state)
            assert wait is not None, "a wait without a deadline"
            if wait != armed:
                armed, deadline = wait, loop.time() + self._seconds(wait)
            try:
                async with asyncio.timeout_at(deadline):
                    event = await self._events.get()
            except TimeoutError:
                armed, event = None, DeadlinePassed(wait)
            await self._apply(event)

    async def _next_when_stuck(self) -> Any:
        assert self._stuck is not None
        if not self._stuck.done():
            self._stuck.set_result(None)
        # No deadline: it has passed, and no caller waits.
        return await self._events.get()

    async def _apply(self, event: Any) -> None:
        self.state, actions = self._step(self.state, event)
        for action in actions:
            try:
                await self._execute(action)
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                # Its channel was closed, which cancels the calls on it.
                self._fail_locally(ConnectionError("the call was cancelled"))
            except Exception as error:
                # A failure here ends this attempt and nothing else.
                if not isinstance(action, Send):
                    self._bug = error
                self._fail_locally(error)
        if self.state.is_ended:
            self._ended.set()
