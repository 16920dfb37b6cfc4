"""Runs work in child processes, where it can harm only its own process.

Life of a child (router/child_side.py):
    STARTING  gets ready
    IDLE      waits for a question, warm
    BUSY      answers a question
    GONE      it exceeded a limit of time or memory; another one replaces it

Children inherit no environment, no open files and no connections, and end with the router.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from observability.logs import fields
from pagewire.protos.call_tasks import mark_seen
from protos.shares import Room
from router.child_side import LENGTH_BYTES
from router.errors import ChildCrash, ChildLimit, Overloaded
from router.tenants.line import Line
from router.tenants.tenant import TenantRules

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # questions that wait for a child; they take milliseconds each
RESPAWN_PAUSE_S = 1.0  # after a start that failed
END_S = 5.0  # from a SIGKILL to the end of the process
READ_BYTES = 1 << 20  # taken from the socket at a time
# Of the router's environment: where a time zone and shared libraries are looked for.
KEPT_VARIABLES = ("TZ", "TZDIR", "LD_LIBRARY_PATH")
BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from {module} import main
main()
"""

T = TypeVar("T")
Answer = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildLimits:
    """Limits of one answer."""

    cpu_s: float = 2.0  # processor time
    wall_s: float = 10.0  # on a host that also does other work
    memory_bytes: int = 256 << 20  # beyond what the idle process has
    start_s: float = 30.0  # of a child: the interpreter, imports, getting ready


class ChildPool:
    """A few warm children of one kind. Tenants whose questions wait take turns.

    Args:
        module: Has the `main` that children run.
        settings: Their first message; read when a child starts.
        check_ready: Takes the answer to the settings, and raises if it is wrong.
        num_children: Number of children.
        limits: The limits of each answer.
        max_answer_bytes: Longer answers exceed a limit.
        busy: Text of the error when too many wait: "chats wait to be rendered".
    """

    def __init__(
        self,
        module: str,
        settings: Callable[[], Mapping[str, object]],
        *,
        check_ready: Callable[[Answer], None],
        num_children: int,
        limits: ChildLimits,
        max_answer_bytes: int,
        busy: str,
    ) -> None:
        self._module = module
        self._settings = settings
        self._check_ready = check_ready
        self._num_children = num_children
        self._limits = limits
        self._max_answer_bytes = max_answer_bytes
        self._busy = busy
        self._children: set[_Child] = set()
        self._idle: Line[_Child] = Line()
        self._waiting = Room(MAX_WAITING)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start the children; raise what `check_ready` raises, or ChildLimit, when all ended."""
        spawning = [self._hold(self._spawn()) for _ in range(self._num_children)]
        try:
            for child in await asyncio.gather(*spawning):
                self._idle.put(child)
        except BaseException:
            await self.close()  # no process outlives a failure
            raise

    async def ask(self, question: Mapping[str, object], tenant: TenantRules) -> Answer:
        """Return the answer of some child to a question of a tenant.

        Raises:
            ChildLimit: The answer exceeds a limit.
            Overloaded: Too many questions wait, or too many of this tenant.
        """
        if not self._waiting.take(tenant.name, weight=tenant.weight_of_room):
            raise Overloaded(f"{self._waiting.taken} {self._busy}", self._limits.cpu_s)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                while (child := await self._idle.get(tenant)).is_gone:  # killed while idle
                    self._hold(self._replace(child))
        except TimeoutError:
            raise Overloaded(f"too many {self._busy}", self._limits.cpu_s) from None
        finally:
            self._waiting.leave(tenant.name)
        # A caller that leaves must not leave a child with half an answer.
        return await asyncio.shield(self._hold(self._ask(child, question)))

    async def close(self) -> None:
        """End all children; no question may be under way."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_S)
        await asyncio.gather(*(self._end(child) for child in list(self._children)))

    async def _ask(self, child: "_Child", question: Mapping[str, object]) -> Answer:
        try:
            answer = await child.ask(question, self._limits.wall_s)
        except Exception:  # also a bug here: whatever is left of the child, its place is not lost
            self._hold(self._replace(child))
            raise
        self._idle.put(child)
        return answer

    async def _replace(self, child: "_Child") -> None:
        await self._end(child)
        while True:
            try:
                self._idle.put(await self._spawn())
            except Exception as error:  # also of check_ready
                logger.warning("child_failed", extra=fields(kind=self._module, error=str(error)))
                await asyncio.sleep(RESPAWN_PAUSE_S)
            else:
                return

    async def _spawn(self) -> "_Child":
        child = await _Child.start(self._module, self._limits, self._max_answer_bytes)
        self._children.add(child)
        settings = {
            **self._settings(),
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes,
        }
        try:
            self._check_ready(await child.ask(settings, self._limits.start_s))
        except BaseException:
            await self._end(child)
            raise
        return child

    async def _end(self, child: "_Child") -> None:
        await child.end()
        self._children.discard(child)  # not earlier: if this is cancelled, `close` waits for it

    def _hold(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(mark_seen)  # of an answer whose caller left
        return task


class _Child:
    """One process, and the router's end of the socket that is its standard input."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: ChildLimits,
        max_answer_bytes: int,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._max_answer_bytes = max_answer_bytes

    @property
    def is_gone(self) -> bool:
        return self._process.poll() is not None

    @classmethod
    async def start(cls, module: str, limits: ChildLimits, max_answer_bytes: int) -> "_Child":
        ours, theirs = socket.socketpair()
        with theirs:
            path = [str(Path(each).resolve()) for each in sys.path]  # "" is the current folder
            process = subprocess.Popen(  # noqa: S603 - fixed arguments
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-X",
                    "utf8",
                    "-c",
                    BOOT.format(module=module),
                    json.dumps(path),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C is the router's business
            )
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
        except BaseException:
            process.kill()
            ours.close()
            raise
        return cls(process, reader, writer, limits, max_answer_bytes)

    async def ask(self, question: Mapping[str, object], wall_s: float) -> Answer:
        """Return the answer to a message; after ChildLimit the child cannot be used again."""
        encoded = json.dumps(question, ensure_ascii=False).encode()
        try:
            async with asyncio.timeout(wall_s):
                self._writer.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
                await self._writer.drain()
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                if length > self._max_answer_bytes:
                    raise ChildLimit(f"wrote {length} bytes")
                answer: Any = json.loads(await self._reader.readexactly(length))
        except TimeoutError:
            raise ChildLimit(f"took longer than {wall_s:g} s") from None
        except (EOFError, ConnectionError):
            raise await self._cause_of_death() from None
        except (ValueError, RecursionError):
            raise ChildLimit("wrote no valid answer") from None
        if not _is_answer(answer):
            raise ChildLimit("wrote no valid answer")
        if "exceeded" in answer:
            raise ChildLimit(answer["exceeded"])
        return answer

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._writer.close()
        await self._wait()

    async def _cause_of_death(self) -> ChildLimit:
        code = await self._wait()
        if code == -signal.SIGPROF:
            return ChildLimit(f"took more than {self._limits.cpu_s:g} s of processor time")
        logger.info("child_crashed", extra=fields(code=code))
        return ChildCrash("crashed its process")

    async def _wait(self) -> int | None:
        try:
            return await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            logger.warning("child_stuck", extra=fields(pid=self._process.pid))
            return None


def _is_answer(found: object) -> TypeGuard[Answer]:
    return isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
