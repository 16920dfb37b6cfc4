"""One thread that advances many slow operations in turns, by polling.

NCCL needs all calls for a GPU to come from one thread, and none may block inside a call. So an
operation is a generator: it issues calls, and yields whenever it would wait.
"""

import queue
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, TypeVar

from kv_transfer.errors import ConnectionBroken

T = TypeVar("T")

Steps = Generator[None, None, T]

# NCCL offers nothing to wait on that also reports errors; a poll costs a few microseconds.
POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class _Operation:
    owner: object
    steps: Steps[Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class _Drop:
    owner: object
    dropped: Future[None]


class PollingThread:
    """Runs operations until `close`; starts at construction."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[_Operation | _Drop | None] = queue.SimpleQueue()
        self._operations: list[_Operation] = []
        self._lock = threading.Lock()
        self._has_ended = False  # the thread; it then answers no command
        # A daemon: a thread that hangs inside NCCL must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, owner: object, steps: Steps[T]) -> Future[T]:
        """Run an operation; operations of all owners take turns."""
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # from now on cancelling the future does nothing
        self._command(_Operation(owner, steps, result))
        return result

    def drop(self, owner: object) -> Future[None]:
        """End all operations of an owner; done when the thread is in none of them any more."""
        dropped: Future[None] = Future()
        dropped.set_running_or_notify_cancel()
        self._command(_Drop(owner, dropped))
        return dropped

    def close(self, timeout_s: float) -> None:
        """End all operations, later ones at once, and the thread."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def _command(self, command: _Operation | _Drop) -> None:
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                return
        self._refuse(command)

    def _run(self) -> None:
        while self._take_commands():
            for operation in list(self._operations):
                self._advance(operation)
            if self._operations:
                time.sleep(POLL_S)
        for operation in self._operations:
            _end(operation)
        with self._lock:
            self._has_ended = True
        while not self._commands.empty():
            if command := self._commands.get():
                self._refuse(command)

    @staticmethod
    def _refuse(command: _Operation | _Drop) -> None:
        """Answer a command that comes after the end, when the thread is in no operation."""
        if isinstance(command, _Operation):
            _end(command)
        else:
            command.dropped.set_result(None)

    def _take_commands(self) -> bool:
        while True:
            try:
                command = self._commands.get(block=not self._operations)
            except queue.Empty:
                return True
            match command:
                case None:
                    return False
                case _Operation():
                    self._operations.append(command)
                case _Drop(owner=owner, dropped=dropped):
                    mine = [each for each in self._operations if each.owner is owner]
                    self._operations = [each for each in self._operations if each not in mine]
                    for operation in mine:
                        _end(operation)
                    dropped.set_result(None)

    def _advance(self, operation: _Operation) -> None:
        try:
            next(operation.steps)
        except StopIteration as stop:
            self._operations.remove(operation)
            operation.result.set_result(stop.value)
        except Exception as error:
            self._operations.remove(operation)
            # Else whoever keeps the error keeps the memory of the device that the operation used.
            clear_frames(error.__traceback__)
            operation.result.set_exception(error)


def _end(operation: _Operation) -> None:
    operation.steps.close()
    operation.result.set_exception(ConnectionBroken("the connection was aborted"))
