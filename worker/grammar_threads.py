"""Work on grammars, in a few of the worker's threads, at which tenants take turns.

To compile a grammar may take most of a second, and a mask a tenth of one. In all threads at once,
such work would delay the digests and copies of pages; in one line, that of other tenants.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kv_transfer.driver import RunBlocking
from worker.background import BackgroundTasks

MAX_RUNNING = 4  # threads; asyncio has five or more
TURN_S = 0.005  # of a thread; pieces that it has not begun by then wait for the next turn
MAX_PIECES = 256  # of a turn, as many as a batch usually has choices

T = TypeVar("T")
Then = Callable[[Exception | None], None]


class _Piece(NamedTuple):
    salt: bytes
    work: Callable[[], None]
    then: Then


class _Done(NamedTuple):
    error: Exception | None
    seconds: float


class GrammarThreads:
    """Runs pieces of work, in turns of a few milliseconds; salts alternate, each in its own order.

    A salt whose last piece took a whole turn has turns of its own: nothing of others waits in them.

    Args:
        run_blocking: Runs a turn in a thread.
        tasks: Own the turns.
    """

    def __init__(self, run_blocking: RunBlocking, tasks: BackgroundTasks) -> None:
        self._run_blocking = run_blocking
        self._tasks = tasks
        self._waiting: dict[bytes, deque[_Piece]] = {}  # salt |-> its pieces, never none
        self._slow: set[bytes] = set()  # those of the waiting whose last piece took a whole turn
        self._num_running = 0
        self._is_starting = False  # one of these will take what was added meanwhile
        self._is_slow = False  # the last turn took all its time: threads share what waits

    def add(self, salt: bytes, work: Callable[[], None], then: Then) -> None:
        """Have a piece of work done.

        Args:
            salt: Of the tenant's cache.
            work: Runs in a thread.
            then: Called in the event loop, with the error that the work raised; must not raise.
        """
        self._waiting.setdefault(salt, deque()).append(_Piece(salt, work, then))
        if self._num_running < MAX_RUNNING and not self._is_starting:
            self._start_thread()

    async def run(self, salt: bytes, work: Callable[[], T]) -> T:
        """Return the result of a piece of work; raises what it raises."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        found: list[T] = []

        def then(error: Exception | None) -> None:
            if result.done():  # its caller has left
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(found[0])

        self.add(salt, lambda: found.append(work()), then)
        return await result

    def _start_thread(self) -> None:
        self._num_running += 1
        self._is_starting = True
        self._tasks.start(self._run_turns(), name="grammars")

    async def _run_turns(self) -> None:
        clock = asyncio.get_running_loop().time
        self._is_starting = False
        try:
            while pieces := self._take():
                done: list[_Done] = []
                begun_at = clock()
                try:
                    await self._run_blocking(lambda: _work(pieces, done, clock))  # noqa: B023
                except Exception as error:  # no thread could begin
                    done = [_Done(error, 0.0)] * len(pieces)
                self._is_slow = clock() >= begun_at + TURN_S
                if len(done) < len(pieces):
                    self._put_back(pieces[len(done) :])
                    while self._num_running < MAX_RUNNING:
                        self._start_thread()
                for piece, each in zip(pieces, done, strict=False):
                    self._note(piece.salt, is_slow=each.seconds >= TURN_S)
                    piece.then(each.error)
        finally:
            self._num_running -= 1

    def _take(self) -> list[_Piece]:
        """Take the pieces of a turn: one of each salt, then the next of each.

        A slow salt is left out, or has the turn for one piece if it is the next.
        """
        first = next(iter(self._waiting), None)
        if first in self._slow:
            return [self._take_of(first)]
        most = MAX_PIECES
        if self._is_slow:
            most = min(most, -(-sum(map(len, self._waiting.values())) // MAX_RUNNING))
        pieces: list[_Piece] = []
        while len(pieces) < most and (salt := self._next_quick()) is not None:
            pieces.append(self._take_of(salt))
        return pieces

    def _next_quick(self) -> bytes | None:
        return next((each for each in self._waiting if each not in self._slow), None)

    def _take_of(self, salt: bytes) -> _Piece:
        """Take a piece of a salt, which comes last then."""
        line = self._waiting.pop(salt)
        piece = line.popleft()
        if line:
            self._waiting[salt] = line
        else:
            self._slow.discard(salt)
        return piece

    def _note(self, salt: bytes, *, is_slow: bool) -> None:
        """Note how long a piece took; a slow salt goes behind those that came meanwhile."""
        if not is_slow or salt not in self._waiting:
            self._slow.discard(salt)
            return
        self._slow.add(salt)
        self._waiting[salt] = self._waiting.pop(salt)

    def _put_back(self, pieces: list[_Piece]) -> None:
        """Have pieces that were not begun done first."""
        lines: dict[bytes, deque[_Piece]] = {}
        for piece in pieces:
            lines.setdefault(piece.salt, deque()).append(piece)
        for salt, line in lines.items():
            later = self._waiting.pop(salt, deque())
            later.extendleft(reversed(line))
            lines[salt] = later
        self._waiting = lines | self._waiting


def _work(pieces: list[_Piece], done: list[_Done], clock: Callable[[], float]) -> None:
    """Work on pieces until the turn is over, at least on one; append what became of each."""
    begun_at = clock()
    end = begun_at + TURN_S
    for piece in pieces:
        found: Exception | None = None
        try:
            piece.work()
        except Exception as error:  # a bug in one piece must not lose the others
            found = error
        except BaseException as error:  # nor must a panic of the library, which is no Exception
            found = RuntimeError(f"work on a grammar ended with {type(error).__name__}: {error}")
            found.__cause__ = error
        now = clock()
        done.append(_Done(found, now - begun_at))
        if now >= end:
            return
        begun_at = now
