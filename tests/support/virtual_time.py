"""An asyncio loop in virtual time, and processes within it that can be killed and paused.

Time jumps to the next timer as soon as nothing is ready, so an hour of timeouts takes
milliseconds, and a run depends on its inputs only. A loop that has nothing ready and no timer is a
wait without a deadline: `DeadlockError` names the tasks that wait.

A `Process` is a label that tasks inherit through their context. Killing it freezes its tasks as
SIGKILL does: no cleanup of theirs runs. Pausing it holds them as SIGSTOP does, timers included;
blocking it holds its tasks, too, while its other threads run.
"""

import asyncio
import contextvars
import heapq
import random
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_MAX_IDLE_STEPS = 200_000  # loop iterations without time passing before a run counts as spinning
_TEARDOWN_S = 600.0  # virtual time that cancelled tasks get to end


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: something waits without a deadline."""


class TimeLimitError(RuntimeError):
    """The run did not end within its virtual time, or spins without time passing."""


class LeftBehindError(RuntimeError):
    """A task or callback raised and nobody awaited it."""


class Process:
    """Tasks that live and die together; states: running, blocked, paused, dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "running"
        self.on_stop: list[Callable[[], None]] = []  # told when its threads run no longer
        self._frozen: set[asyncio.Task[Any]] = set()
        self._held: list[asyncio.Handle] = []  # what became due while not running, in order

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make what is created inside, tasks above all, belong to this process."""
        token = current_process.set(self)
        try:
            yield
        finally:
            current_process.reset(token)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        with self.entered():
            return asyncio.get_running_loop().create_task(coroutine)

    @property
    def has_threads(self) -> bool:
        """Whether anything of it runs, if only threads beside its event loop."""
        return self.state in ("running", "blocked")

    def block(self) -> None:
        """Keep the event loop busy, as a long computation does."""
        if self.state == "running":
            self.state = "blocked"

    def pause(self) -> None:
        if self.state == "running":
            self.state = "paused"
            self._tell_stopped()

    def resume(self) -> None:
        if self.state in ("paused", "blocked"):
            self._run_held()

    def kill(self) -> None:
        """Freeze for good; only the loop's teardown wakes the tasks again, to end them."""
        self.state = "dead"
        # What is frozen waits for nothing that will come; only this keeps it until the teardown.
        self._frozen = asyncio.all_tasks()
        self._tell_stopped()

    def _tell_stopped(self) -> None:
        for tell in self.on_stop:
            tell()

    def _run_held(self) -> None:
        self.state = "running"
        held, self._held = self._held, []
        # Through the loop, so that one may still cancel another.
        asyncio.get_running_loop()._ready.extend(held)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.state}>"


current_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "current_process", default=None
)


class _OfProcess:
    """A handle that runs only while its process does; else the process holds it."""

    __slots__ = ()
    process: Process

    def _run(self) -> None:
        if self.process.state == "running":
            super()._run()  # type: ignore[misc]
        else:
            self.process._held.append(self)  # type: ignore[arg-type]


class _Handle(_OfProcess, asyncio.Handle):
    __slots__ = ("process",)


class _TimerHandle(_OfProcess, asyncio.TimerHandle):
    __slots__ = ("process",)


class _JumpingSelector(selectors.SelectSelector):
    """Never sleeps: a timeout is time that passes at once."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.limit_s = limit_s
        self._idle_steps = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"deadlock at {self.now:.3f} s: a wait without a deadline")
        if timeout > 0:
            self.now += timeout
            self._idle_steps = 0
            if self.now > self.limit_s:
                raise TimeLimitError(
                    f"the run passed its limit of {self.limit_s} s of virtual time"
                )
        else:
            self._idle_steps += 1
            if self._idle_steps > _MAX_IDLE_STEPS:
                raise TimeLimitError(f"the run spins at {self.now:.3f} s: time does not pass")
        return []  # nothing real is ever registered but the loop's own wake-up pipe


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; use run_virtual."""

    def __init__(self, limit_s: float) -> None:
        self._jumping = _JumpingSelector(limit_s)
        self._thread = threading.get_ident()
        self.processes: dict[int, Process] = {}  # id |-> every process that has tasks here
        self.unhandled: list[dict[str, Any]] = []
        super().__init__(self._jumping)
        self.set_exception_handler(lambda _loop, details: self.unhandled.append(details))
        self._process_of: weakref.WeakKeyDictionary[asyncio.Task[Any], Process | None] = (
            weakref.WeakKeyDictionary()
        )
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def process_of(self, task: "asyncio.Task[Any]") -> Process | None:
        """Return the process that a task belongs to."""
        return self._process_of.get(task)

    def time(self) -> float:
        return self._jumping.now

    def extend_limit(self, seconds: float) -> None:
        self._jumping.limit_s = self._jumping.now + seconds
        self._jumping._idle_steps = 0

    def call_soon(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(current_process)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        handle = _Handle(callback, args, self, context)
        handle.process = process
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self,
        when: float,
        callback: Any,
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(current_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _TimerHandle(when, callback, args, self, context)
        timer.process = process
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context, **options)
        process = current_process.get() if context is None else context.get(current_process)
        self._process_of[task] = process
        if process is not None:
            self.processes[id(process)] = process
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        raise RuntimeError(
            f"{func!r} would run in a thread; virtual time has one thread, pass a direct call"
        )

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError("call_soon_threadsafe: virtual time has one thread")
        return self.call_soon(callback, *args, context=context)


def run_virtual(coro: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Run a coroutine to its end in virtual time, starting at 0.

    Raises:
        DeadlockError: Something waits without a deadline and nothing else can happen.
        TimeLimitError: The run took longer than `limit_s` of virtual time, or spins.
        LeftBehindError: A task failed or a callback raised, and nobody looked.
    """
    loop = VirtualLoop(limit_s)
    asyncio.set_event_loop(loop)
    try:
        main = loop.create_task(coro)
        try:
            result = loop.run_until_complete(main)
        except (DeadlockError, TimeLimitError) as error:
            waiting = _describe(asyncio.all_tasks(loop))
            _end_tasks(loop)
            raise type(error)(f"{error}; tasks:\n{waiting}") from None
        except BaseException:
            _end_tasks(loop)
            raise
        unhandled = list(loop.unhandled)
        _end_tasks(loop)
        if unhandled:
            _raise_unhandled(unhandled)
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def wait_until(
    condition: Callable[[], bool], *, timeout_s: float = 60.0, what: str = "the condition"
) -> float:
    """Wait for a condition of the test, looking every millisecond; return how long it took."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    while not condition():
        if loop.time() - started_at > timeout_s:
            raise AssertionError(f"{what} did not become true within {timeout_s} s")
        await asyncio.sleep(0.001)
    return loop.time() - started_at


async def run_inline(function: Callable[[], T], /) -> T:
    """Run a blocking function at once: threads have no place in virtual time."""
    return function()


def seeded(seed: int, *purpose: object) -> random.Random:
    """Return a generator of its own for one purpose of a seeded run."""
    return random.Random(f"{seed}/{purpose}")


def _end_tasks(loop: VirtualLoop) -> None:
    """Cancel whatever is left, frozen tasks too, so that nothing ends in the garbage collector."""
    loop.extend_limit(_TEARDOWN_S)
    try:
        loop.run_until_complete(_cancel_rest(loop))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except (DeadlockError, TimeLimitError):
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]


async def _cancel_rest(loop: VirtualLoop) -> None:
    me = asyncio.current_task()
    for process in loop.processes.values():
        process._run_held()
    for _ in range(100):  # a task may swallow a cancellation, or start another task
        rest = [task for task in asyncio.all_tasks(loop) if task is not me]
        if not rest:
            return
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=_TEARDOWN_S / 200)
        for task in rest:
            if task.done() and not task.cancelled():
                task.exception()


def _describe(tasks: set["asyncio.Task[Any]"]) -> str:
    lines = []
    for task in sorted(tasks, key=lambda each: each.get_name()):
        frames = task.get_stack(limit=3)
        places = ", ".join(f"{f.f_code.co_qualname}:{f.f_lineno}" for f in frames[-3:])
        lines.append(f"  {task.get_name()}: {places or 'not started'}")
    return "\n".join(lines)


def _raise_unhandled(unhandled: list[dict[str, Any]]) -> NoReturn:
    first = unhandled[0]
    messages = "; ".join(
        f"{each.get('message')}: {each.get('exception')!r}" for each in unhandled[:5]
    )
    raise LeftBehindError(messages) from first.get("exception")
