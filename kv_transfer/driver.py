"""Runs one pure state machine of a transfer: steps it at each event, arms its deadlines.

`Receiver` and `Sender` each own a Driver and give it their machine and a function that executes
one action; their owners call the driver for what both have in common. An event is applied, and its
actions are executed, before `post` returns: a driver needs no task of its own. It starts with the
first event and stops when the machine is finished, which after a failure can be later than the
outcome: the machine first becomes quiescent.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kv_transfer.deadlines import Wait
from kv_transfer.errors import ConnectionBroken
from kv_transfer.protocol import Cancelled, DeadlinePassed, Failure, Send, StreamLost

State = TypeVar("State", bound="MachineState")
Event = TypeVar("Event")
Action = TypeVar("Action")
T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs a function that may take long, such as `asyncio.to_thread`."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStats:
    """The amounts that one attempt moved."""

    pages_moved: int = 0
    bytes_moved: int = 0


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
    """Steps one attempt's machine. Actions are executed in order, each before the next event."""

    def __init__(
        self,
        *,
        state: State,
        step: Callable[[State, Any], tuple[State, tuple[Action, ...]]],
        waiting_for: Callable[[State], Wait | None],
        seconds: Callable[[Wait], float],
        execute: Callable[[Action], None],
    ) -> None:
        self.state = state
        self._step = step
        self._waiting_for = waiting_for
        self._seconds = seconds
        self._execute = execute
        self._events: deque[Any] = deque()  # posted while another is applied
        self._is_stepping = False
        self._has_started = False
        self.is_over = False  # no event is applied any more
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()  # no caller should wait longer: finished, or stuck
        self._armed: Wait | None = None
        self._deadline: asyncio.TimerHandle | None = None  # that of `_armed`
        self._jobs: set[asyncio.Task[None]] = set()
        self._when_finished: list[Callable[[], None]] = []
        self._cause: Exception | None = None  # the local cause of the machine's failure, if any
        self._bug: Exception | None = None  # a callback of the caller, or the machine, raised

    def start(self) -> None:
        """Let the first deadline begin; later calls do nothing."""
        if not self._has_started:
            self._has_started = True
            self._run()

    def post(self, event: Event | Cancelled | StreamLost) -> None:
        """Hand an event to the machine; after its end nothing is kept."""
        self._has_started = True
        self._events.append(event)
        self._run()

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a job in the background; it reports by posting an event."""
        task = asyncio.get_running_loop().create_task(self._guard(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        # Python warns of a coroutine that was cancelled before it began, unless it is closed.
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
            self.cancel("cancelled")
            raise
        if self._bug is not None:
            raise self._bug
        if self.state.failure is not None:
            raise self.state.failure.error() from self._cause

    def stream_lost(self, detail: str) -> None:
        """Note that no more messages will come from the other side."""
        self.post(StreamLost(detail))

    def cancel(self, reason: str) -> None:
        """Give up, and tell the other side."""
        self.post(Cancelled(reason))

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
        if self._has_started:
            await self._settled.wait()
        if not self.state.is_quiescent:
            raise self._bug or ConnectionBroken("abort did not return in time; restart this worker")
        if self._jobs:  # cancelled ones, which clean up
            await asyncio.wait(self._jobs, timeout=1.0)

    def call_when_quiescent(self, callback: Callable[[], None]) -> None:
        """After wait_quiescent: call back at once, or when an overdue abort returns, or never.

        Raises:
            Exception: The bug that broke the machine, which will never know what is over.
        """
        if self.state.is_quiescent:
            callback()
        elif self.is_over:
            assert self._bug is not None
            raise self._bug
        else:
            self._when_finished.append(callback)

    def _run(self) -> None:
        """Apply all events, then wait for the next one or the deadline."""
        if self._is_stepping:
            return  # the caller below applies it
        if self.is_over:
            self._events.clear()  # they change nothing
            return
        self._is_stepping = True
        try:
            while self._events:
                self._apply(self._events.popleft())
            if not self.state.is_finished:
                self._await_next()
        except Exception as error:  # of the machine
            self._bug = error
            self._stop()
            return
        finally:
            self._is_stepping = False
        if self.state.is_finished:
            self._stop()

    def _await_next(self) -> None:
        wait = None
        if self.state.is_stuck:
            self._settled.set()
        else:
            wait = self._waiting_for(self.state)
            assert wait is not None, "a wait without a deadline"
        self._arm(wait)

    def _apply(self, event: Any) -> None:
        self.state, actions = self._step(self.state, event)
        for action in actions:
            try:
                self._execute(action)
            except Exception as error:
                # A failure here ends this attempt and nothing else.
                if not isinstance(action, Send):
                    self._bug = error
                self._fail_locally(error)
        if self.state.is_ended:
            self._ended.set()

    def _arm(self, wait: Wait | None) -> None:
        if wait == self._armed:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._armed = wait
        if wait is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._seconds(wait), self._pass_deadline, wait)

    def _pass_deadline(self, wait: Wait) -> None:
        self._armed = self._deadline = None
        self._events.append(DeadlinePassed(wait))
        self._run()

    def _stop(self) -> None:
        self.is_over = True
        self._events.clear()
        self._arm(None)
        # Both lead back to the owner. Cycles would be left to the collector, which stops the loop.
        del self._seconds, self._execute
        self._ended.set()
        self._settled.set()
        if not self.state.is_quiescent:
            return  # a bug: what is posted goes on
        for job in self._jobs - {asyncio.current_task()}:
            job.cancel()
        callbacks, self._when_finished = self._when_finished, []
        for callback in callbacks:
            callback()

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as error:
            self._fail_locally(error)
            self._run()

    def _fail_locally(self, error: Exception) -> None:
        self._cause = self._cause or error
        self._events.append(StreamLost(f"{type(error).__name__}: {error}"))
