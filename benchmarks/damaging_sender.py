"""The sending side of benchmarks.corruption: a process that computes prompts and damages pages.

Its sender is the product's: it computes digests of the right pages and tells them. Only the
connection differs: it copies a chunk into other pages of the same storage, damages it there, and
sends those pages. So the damage travels over the transport.
"""

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.altered_workers import live_apart
from benchmarks.page_damage import Damage, damaged
from kv_cache.page_storage import PageStorage
from kv_transfer.deadlines import TransferDeadlines
from kv_transfer.errors import TransferError
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Abort, ChunkAck, ChunkGo, Ticket
from kv_transfer.order import Outgoing
from kv_transfer.sender import Sender
from kv_transfer.transport import Connection, Transport, close_transports, open_transports
from llm_engine.drawing import next_draw
from llm_engine.engine import Engine
from llm_engine.load_engine import load_engine
from llm_engine.sampling import SamplingParams, SequenceSlice

HOST = "127.0.0.1"
PAGE_SIZE = 16
PROMPTS, PROMPT_PAGES, CHUNK_PAGES = 4, 24, 8
OUTPUT_TOKENS = 16
OUTPUT_PAGES = -(-OUTPUT_TOKENS // PAGE_SIZE)
SEQUENCE_PAGES = PROMPT_PAGES + OUTPUT_PAGES
NUM_PAGES = 2 * PROMPTS * SEQUENCE_PAGES  # the second half: to send from, or to receive into
DEADLINES = TransferDeadlines()


class NoTransport(Exception):
    """A device has no transport of that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The model, device and transport of a process."""

    model: Path
    device: str  # "cpu" or "cuda:1"
    transport: str  # name; empty: the best
    lives_apart: bool  # see altered_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Request: compute this prompt in place of another one; answered by Computed."""

    prompt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The digests of its pages, and its tokens where it never moved."""

    page_sums: tuple[bytes, ...]  # SHA-256
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Connect:
    """Request: take a connection; answered by an error's text, or by none."""

    connection_id: str
    offer: bytes
    key: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """Request: send a prompt, with one chunk damaged; answered by Ended."""

    ticket: Ticket
    prompt: int
    chunk: int = 0
    injuries: tuple[Damage, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A prompt was sent, and nothing reads its pages any more."""

    ticket: Ticket
    num_injuries: int  # pages that were sent wrong
    error: str


class Line:
    """A pipe to the other process, as a queue; an unreadable message ends it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        Thread(target=self._listen, daemon=True).start()

    def send(self, message: object) -> None:
        self._pipe.send(message)

    async def hear(self) -> Any:
        """Return the next message; EOFError: the other process is gone."""
        message = await self._heard.get()
        if message is None:
            raise EOFError
        return message

    def _listen(self) -> None:
        try:
            while True:
                self._tell(self._pipe.recv())
        except (EOFError, OSError):
            self._tell(None)

    def _tell(self, message: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._heard.put_nowait, message)


def make_engine(side: Side) -> Engine:
    """Load the model."""
    device, _, index = side.device.partition(":")
    if index:  # as a worker, this process sees one GPU; before it asks for any
        os.environ["CUDA_VISIBLE_DEVICES"] = index
    return load_engine(side.model, page_size=PAGE_SIZE, num_pages=NUM_PAGES, device=device)


def make_transport(side: Side, storage: PageStorage) -> Transport:
    """Return the requested transport; NoTransport: there is none."""
    if side.lives_apart:
        live_apart()
    offered = open_transports(storage, side.device.partition(":")[0], HOST)
    for each in offered:
        if side.transport in ("", each.name):
            return each
    names = ", ".join(each.name for each in offered)
    raise NoTransport(f"{side.device} has no transport {side.transport!r}, only {names}")


def go_on(
    engine: Engine,
    token_ids: Sequence[int],
    page_ids: Sequence[int],
    output: Sequence[int] = (),
) -> list[int]:
    """Return the tokens that follow a prompt, which is computed first if no output is given."""
    tokens = list(output)
    start = len(token_ids) if tokens else 0
    while len(tokens) < OUTPUT_TOKENS:
        fed = [tokens[-1]] if tokens else token_ids
        draw = next_draw(
            SamplingParams(temperature=0.0, ignore_eos=True),
            choice=0,
            prompt_token_ids=token_ids,
            output_token_ids=list(tokens),
            eos_token_ids=(),
        )
        piece = SequenceSlice(
            token_ids=fed,
            start=start,
            page_ids=page_ids,
            num_prompt_tokens=len(token_ids),
            draws=(draw,),
        )
        start += len(fed)
        [drawn] = engine.forward([piece])
        assert drawn, "the slice has a draw"
        tokens.append(drawn[0].token_id)
    return tokens


def page_sums(storage: PageStorage, page_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return the SHA-256 of each page."""
    return tuple(hashlib.sha256(row.tobytes()).digest() for row in storage.export_pages(page_ids))


def pages_of(prompt: int) -> range:
    """Return the pages of a prompt and its output at the sender."""
    return range(prompt * SEQUENCE_PAGES, (prompt + 1) * SEQUENCE_PAGES)


@dataclass(eq=False, slots=True)
class DamagingConnection:
    """A connection that damages some chunks. Implements `kv_transfer.transport.Connection`."""

    inner: Connection
    storage: PageStorage
    # pages of a chunk |-> how to send them, once
    planned: dict[tuple[int, ...], Begin] = field(default_factory=dict)
    # First of those to send from; a connection has fewer chunks under way (WINDOW) than are here.
    spare_pages: Iterator[int] = field(
        default_factory=lambda: cycle(
            range(PROMPTS * SEQUENCE_PAGES, NUM_PAGES - CHUNK_PAGES, CHUNK_PAGES)
        )
    )

    @property
    def connection_id(self) -> str:
        return self.inner.connection_id

    @property
    def is_broken(self) -> bool:
        return self.inner.is_broken

    @property
    def max_chunk_bytes(self) -> int:
        return self.inner.max_chunk_bytes

    async def send(self, page_ids: Sequence[int], seconds: float) -> None:
        if plan := self.planned.pop(tuple(page_ids), None):
            others = pages_of((plan.prompt + 1) % PROMPTS)
            contents = damaged(
                self.storage.export_pages(page_ids),
                plan.injuries,
                stale=self.storage.export_pages(others[: len(page_ids)]),
                seed=plan.seed,
            )
            first = next(self.spare_pages)
            page_ids = range(first, first + len(page_ids))
            self.storage.import_pages(page_ids, contents)
        await self.inner.send(page_ids, seconds)

    async def receive(self, page_ids: Sequence[int], seconds: float) -> None:
        await self.inner.receive(page_ids, seconds)

    async def abort(self) -> None:
        await self.inner.abort()


class DamagingSender:
    """Serves the requests of the receiver's process."""

    def __init__(self, side: Side, line: Line) -> None:
        self._engine = make_engine(side)
        self._storage = self._engine.storage
        self._digests = JoinedDigests(self._storage)
        self._transport = make_transport(side, self._storage)
        self._line = line
        self._connection: tuple[DamagingConnection, Outgoing] | None = None
        self._senders: dict[Ticket, Sender] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until the other process is gone."""
        try:
            while True:
                await self._take(await self._line.hear())
        except EOFError:
            await close_transports([self._transport], DEADLINES.abort_s)

    async def _take(self, message: object) -> None:
        match message:
            case Compute(prompt=prompt, token_ids=token_ids):
                page_ids = pages_of(prompt)
                output = go_on(self._engine, token_ids, page_ids)
                sums = page_sums(self._storage, page_ids[:PROMPT_PAGES])
                answer = Computed(page_sums=sums, output_token_ids=tuple(output))
                self._line.send(answer)
            case Connect():
                self._line.send(await self._connect(message))
            case Begin():
                task = asyncio.create_task(self._send(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0)  # it begins before the receiver's next message is taken
            case ChunkGo() | ChunkAck() | Abort():
                if sender := self._senders.get(message.ticket):
                    sender.driver.post(message)

    async def _connect(self, asked: Connect) -> str:
        deadline = asyncio.get_running_loop().time() + DEADLINES.connect_s
        try:
            connection = await self._transport.connect(
                asked.connection_id, asked.offer, asked.key, deadline
            )
        except TransferError as error:
            return str(error)
        damaging = DamagingConnection(connection, self._storage)
        self._connection = damaging, Outgoing(damaging)
        return ""

    async def _send(self, begin: Begin) -> None:
        assert self._connection, "a connection comes first"
        connection, outgoing = self._connection
        sender = self._senders[begin.ticket] = Sender(
            ticket=begin.ticket,
            storage=self._storage,
            outgoing=outgoing,
            send=self._line.send,
            on_ack=lambda first, num: None,
            deadlines=DEADLINES,
            digests=self._digests,
        )
        page_ids = pages_of(begin.prompt)[:PROMPT_PAGES]
        chunks = [page_ids[at : at + CHUNK_PAGES] for at in range(0, PROMPT_PAGES, CHUNK_PAGES)]
        planned = tuple(chunks[begin.chunk])
        if begin.injuries:
            connection.planned[planned] = begin
        sender.grant()
        for index, chunk in enumerate(chunks):
            sender.pages_computed(index * CHUNK_PAGES, chunk, index == len(chunks) - 1)
        error = ""
        try:
            await sender.run()
        except TransferError as failure:
            error = f"{type(failure).__name__}: {failure}"
        await sender.driver.wait_quiescent()
        del self._senders[begin.ticket]
        is_unsent = connection.planned.pop(planned, None)
        num = 0 if is_unsent else sum(len(each.places) for each in begin.injuries)
        self._line.send(Ended(ticket=begin.ticket, num_injuries=num, error=error))


def main(pipe: Pipe, side: Side) -> None:
    """Run in a separate process; the first message says that it is ready, or why it is not."""

    async def serve() -> None:
        line = Line(pipe)
        try:
            sender = DamagingSender(side, line)
        except NoTransport as error:
            line.send(str(error))
            return
        line.send("")
        await sender.serve()

    asyncio.run(serve())
