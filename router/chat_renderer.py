"""Renders chats in child processes, so that a template can harm nothing but the process it is in.

Life of a child (router/chat_child.py):
    STARTING  compiles the template
    IDLE      waits for a chat, warm
    BUSY      renders one chat
    GONE      it passed a limit of time or memory; another one is started in its place

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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from observability.logs import fields
from pagewire.protos.call_tasks import mark_seen
from router.chat_child import LENGTH_BYTES
from router.chat_template import ChatTemplate
from router.errors import (
    ChatTemplateError,
    Overloaded,
    RefusedByTemplate,
    TemplateLimit,
    WrongTools,
)

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # chats that wait for a child; they take milliseconds each
RESPAWN_PAUSE_S = 1.0  # after a start that failed
END_S = 5.0  # from a SIGKILL to the end of the process
BYTES_PER_CHAR = 6  # the most in JSON, of a control character
READ_BYTES = 1 << 20  # taken from the socket at a time
ANSWER_BYTES = 8192  # what an answer without text can take
PROBE = ({"role": "user", "content": "Hello"},)
# Of the router's environment: where a time zone and shared libraries are looked for.
KEPT_VARIABLES = ("TZ", "TZDIR", "LD_LIBRARY_PATH")
BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from router.chat_child import main
main()
"""

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]


class ChatRenderer(Protocol):
    """Turns chats into prompt texts."""

    async def start(self) -> None:
        """Get ready; raise ChatTemplateError if the template cannot be used."""
        ...

    async def render(self, messages: Messages, tools_json: str = "") -> str:
        """Render a chat, as ChatTemplate does; also raises Overloaded."""
        ...

    async def close(self) -> None:
        """End; no rendering may be under way."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderLimits:
    """What one rendering may take."""

    cpu_s: float = 2.0  # processor time
    wall_s: float = 10.0  # on a host that has others to serve
    memory_bytes: int = 256 << 20  # beyond what the idle process has
    start_s: float = 30.0  # of a child: the interpreter, imports, compiling


def check_template(template: ChatTemplate) -> None:
    """Start a child with the template and render a small chat; call it where no event loop runs.

    Raises:
        ChatTemplateError: The template cannot be compiled, or passes a limit.
    """

    async def check() -> None:
        renderer = ChildRenderer(template, num_children=1)
        try:
            await renderer.start()
        finally:
            await renderer.close()

    asyncio.run(check())


class ChildRenderer:
    """Implements ChatRenderer with a few children that are kept."""

    def __init__(
        self, template: ChatTemplate, *, num_children: int = 2, limits: RenderLimits | None = None
    ) -> None:
        self._template = template
        self._num_children = num_children
        self._limits = limits or RenderLimits()
        self._children: set[_Child] = set()
        self._idle: asyncio.Queue[_Child] = asyncio.Queue()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        spawning = (self._spawn() for _ in range(self._num_children))
        # All of them end before the first failure is told: no process outlives it.
        for child in await asyncio.gather(*spawning, return_exceptions=True):
            if isinstance(child, BaseException):
                raise child
            self._idle.put_nowait(child)
        try:
            await self.render(PROBE)
        except RefusedByTemplate:
            return  # it wants another chat
        except TemplateLimit:
            raise
        except ChatTemplateError as error:
            logger.warning("chat_template_failed", extra=fields(error=str(error)))

    async def render(self, messages: Messages, tools_json: str = "") -> str:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} chats wait to be rendered", self._limits.cpu_s)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._limits.wall_s):
                while (child := await self._idle.get()).is_gone:  # killed by somebody, while idle
                    self._hold(self._replace(child))
        except TimeoutError:
            raise Overloaded("no chat could be rendered in time", self._limits.cpu_s) from None
        finally:
            self._num_waiting -= 1
        chat = {"messages": list(messages), "tools_json": tools_json}
        # A caller that leaves must not leave a child with half an answer.
        return await asyncio.shield(self._hold(self._render(child, chat)))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_S)
        await asyncio.gather(*(self._end(child) for child in list(self._children)))

    async def _render(self, child: "_Child", chat: Mapping[str, object]) -> str:
        try:
            answer = await child.ask(chat, self._limits.wall_s)
        except TemplateLimit:
            self._hold(self._replace(child))
            raise
        self._idle.put_nowait(child)
        return _text(answer)

    async def _replace(self, child: "_Child") -> None:
        await self._end(child)
        while True:
            try:
                self._idle.put_nowait(await self._spawn())
            except (OSError, ChatTemplateError) as error:
                logger.warning("chat_child_failed", extra=fields(error=str(error)))
                await asyncio.sleep(RESPAWN_PAUSE_S)
            else:
                return

    async def _spawn(self) -> "_Child":
        child = await _Child.start(self._limits, max_chars=self._template.max_chars)
        self._children.add(child)
        settings = {
            "source": self._template.source,
            "special_tokens": self._template.special_tokens,
            "max_chars": self._template.max_chars,
            "cpu_s": self._limits.cpu_s,
            "memory_bytes": self._limits.memory_bytes,
        }
        try:
            _check(await child.ask(settings, self._limits.start_s))
        except BaseException:
            await self._end(child)
            raise
        return child

    async def _end(self, child: "_Child") -> None:
        self._children.discard(child)
        await child.end()

    def _hold(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(mark_seen)  # of a rendering whose caller left
        return task


class _Child:
    """One process, and the router's end of the socket that is its standard input."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: RenderLimits,
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
    async def start(cls, limits: RenderLimits, *, max_chars: int) -> "_Child":
        ours, theirs = socket.socketpair()
        with theirs:
            path = [str(Path(each).resolve()) for each in sys.path]  # "" is the current folder
            process = subprocess.Popen(  # noqa: S603 - fixed arguments
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", BOOT, json.dumps(path)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C is the router's business
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=READ_BYTES)
        max_answer_bytes = ANSWER_BYTES + BYTES_PER_CHAR * max_chars
        return cls(process, reader, writer, limits, max_answer_bytes)

    async def ask(self, question: Mapping[str, object], wall_s: float) -> dict[str, str]:
        """Return the answer to a message; TemplateLimit means that the child is of no more use."""
        encoded = json.dumps(question, ensure_ascii=False).encode()
        try:
            async with asyncio.timeout(wall_s):
                self._writer.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
                await self._writer.drain()
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                if length > self._max_answer_bytes:
                    raise TemplateLimit(f"wrote {length} bytes")
                answer: dict[str, str] = json.loads(await self._reader.readexactly(length))
        except TimeoutError:
            raise TemplateLimit(f"took longer than {wall_s:g} s") from None
        except (EOFError, ConnectionError):
            raise TemplateLimit(await self._cause_of_death()) from None
        except (ValueError, RecursionError):
            raise TemplateLimit("wrote what is no answer") from None
        if "exceeded" in answer:
            raise TemplateLimit(answer["exceeded"])
        return answer

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._writer.close()
        await self._wait()

    async def _cause_of_death(self) -> str:
        code = await self._wait()
        if code == -signal.SIGPROF:
            return f"took more than {self._limits.cpu_s:g} s of processor time"
        return f"ended its process, with code {code}"

    async def _wait(self) -> int | None:
        try:
            return await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            logger.warning("chat_child_stuck", extra=fields(pid=self._process.pid))
            return None


def _text(answer: Mapping[str, str]) -> str:
    _check(answer)
    return answer["text"]


def _check(answer: Mapping[str, str]) -> None:
    if "tools" in answer:
        raise WrongTools(answer["tools"])
    if "refused" in answer:
        raise RefusedByTemplate(answer["refused"])
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
