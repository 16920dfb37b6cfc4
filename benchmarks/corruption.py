"""Corrupted pages: how many of them the receiver finds, and whether it ever reads one.

    python -m benchmarks.corruption --out benchmarks/results/corruption-cpu.json

Two processes each have an engine with the same small model, with its real storage and digests, and
a real transport between them. One computes prompts and sends their pages; it damages some of them
after it has computed their digests (damaging_sender.py, page_damage.py). This process receives
them with the product's own receiver. Several transfers share the connection, some of them
undamaged.

A damaged page is found if its transfer fails with a DigestMismatch that gives the exact number of
damaged pages and the first of them, and nothing from this chunk on is committed. Committed pages
are compared with the sender's by SHA-256. At the end each prompt is decoded from undamaged pages;
its tokens must equal the sender's, where nothing moved.

On a host with GPUs: `--devices cuda:0 cuda:1`, and `--transport NAME` where there are several. With
one GPU, `--devices cuda:0 cuda:0 --transport nccl` sends over sockets, as between hosts.
"""

import argparse
import asyncio
import multiprocessing
import random
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from benchmarks import damaging_sender
from benchmarks.damaging_sender import (
    CHUNK_PAGES,
    DEADLINES,
    NUM_PAGES,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    PROMPT_PAGES,
    PROMPTS,
    SEQUENCE_PAGES,
    Begin,
    Compute,
    Computed,
    Connect,
    Ended,
    Line,
    NoTransport,
    Side,
    go_on,
    make_engine,
    make_transport,
    page_sums,
)
from benchmarks.measured_host import add_commit, conditions
from benchmarks.page_damage import KINDS, Damage
from benchmarks.prompts import Seeds, token_ids
from benchmarks.result_file import ResultFile, say
from benchmarks.stream_statistics import Row
from cluster.demo_model import demo_model_dir
from kv_transfer.errors import ConnectionBroken, DigestMismatch, TransferError
from kv_transfer.joining import JoinedDigests
from kv_transfer.messages import Ticket
from kv_transfer.order import Incoming
from kv_transfer.receiver import Receiver
from kv_transfer.transport import close_transports

PAGES = 10_000
WAVES_A_PROMPT = 16  # before it is decoded, and another one takes its place
WHOLE_SHARE = 0.25  # of the transfers
ANSWER_S = 60.0  # for the other process to answer
FOUND = re.compile(r"chunk (\d+): (\d+) of \d+ pages differ from their digests, first page (\d+)")


@dataclass(slots=True)
class Count:
    """The outcome of damaged pages, by kind, and of undamaged transfers."""

    injected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    transfers: int = 0  # that were damaged
    whole_transfers: int = 0
    whole_pages: int = 0
    failed_whole_transfers: int = 0
    wrong_commits: int = 0  # committed pages that differ from the sender's
    tokens: int = 0
    wrong_tokens: int = 0
    missed: list[str] = field(default_factory=list)  # why a damaged transfer does not count

    def rows(self) -> list[Row]:
        """Return the content of a result file."""
        kinds: list[Row] = [
            {
                "case": kind,
                "what": what,
                "pages": self.injected[kind],
                "found": self.found[kind],
            }
            for kind, (what, *_) in KINDS.items()
        ]
        total: Row = {
            "case": "all",
            "pages": self.injected.total(),
            "found": self.found.total(),
            "wrong_commits": self.wrong_commits,
            "transfers": self.transfers,
            "whole_transfers": self.whole_transfers,
            "whole_pages": self.whole_pages,
            "failed_whole_transfers": self.failed_whole_transfers,
            "tokens": self.tokens,
            "wrong_tokens": self.wrong_tokens,
            "missed": self.missed,
        }
        return [*kinds, total]


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A prompt that the sender has computed."""

    token_ids: list[int]
    computed: Computed
    pages: Sequence[int] = ()  # that hold it here, whole


class Corruption:
    """The receiving side: requests transfers, and counts their outcomes.

    Args:
        side: The side of this process.
        pipe: The pipe to the sender's process.
        seed: Seed of prompts and damage.
    """

    def __init__(self, side: Side, pipe: Pipe, seed: int) -> None:
        self.count = Count()
        self._engine = make_engine(side)
        self._storage = self._engine.storage
        self._digests = JoinedDigests(self._storage)
        self._transport = make_transport(side, self._storage)
        self._line = Line(pipe)
        self._random = random.Random(seed)  # noqa: S311 - nothing secret
        self._seeds = Seeds(seed * 1_000_000)
        self._incoming: Incoming | None = None
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        self._receivers: dict[Ticket, Receiver] = {}
        self._ended: dict[Ticket, asyncio.Future[Ended]] = {}
        self._num_transfers = 0
        self.transport = self._transport.name
        self.page_bytes = self._storage.page_bytes

    async def run(self, num_pages: int) -> None:
        """Damage at least this many pages."""
        listening = asyncio.create_task(self._listen())
        try:
            if error := await self._answer():
                raise NoTransport(error)
            while self.count.injected.total() < num_pages:
                prompts = [await self._compute(index) for index in range(PROMPTS)]
                for _ in range(WAVES_A_PROMPT):
                    await self._wave(prompts, WHOLE_SHARE)
                    if self.count.injected.total() >= num_pages:
                        break
                await self._wave(prompts, 1.0)
                for each in prompts:
                    self._decode(each)
                say(f"{self.count.injected.total()} pages, {self.count.found.total()} found")
        finally:
            listening.cancel()
            await asyncio.wait({listening})
            await close_transports([self._transport], DEADLINES.abort_s)

    async def _listen(self) -> None:
        while True:
            message = await self._line.hear()
            if isinstance(message, Ended):
                self._ended.pop(message.ticket).set_result(message)
            elif ticket := getattr(message, "ticket", None):
                if receiver := self._receivers.get(ticket):
                    receiver.driver.post(message)
            else:
                self._answers.put_nowait(message)

    async def _answer(self) -> object:
        return await asyncio.wait_for(self._answers.get(), ANSWER_S)

    async def _compute(self, index: int) -> Prompt:
        segment = self._seeds.segment(PROMPT_PAGES * PAGE_SIZE)
        prompt = token_ids([segment], self._engine.config.vocab_size)
        self._line.send(Compute(prompt=index, token_ids=tuple(prompt)))
        computed = await self._answer()
        assert isinstance(computed, Computed)
        return Prompt(token_ids=prompt, computed=computed)

    async def _connected(self) -> Incoming:
        """Return the connection; a new one if the last one broke."""
        if self._incoming is None or self._incoming.connection.is_broken:
            connection_id, key = secrets.token_hex(16), secrets.token_bytes(32)
            deadline = asyncio.get_running_loop().time() + DEADLINES.connect_s
            offer = self._transport.offer(connection_id, key)
            self._line.send(Connect(connection_id=connection_id, offer=offer, key=key))
            connection = await self._transport.accept(connection_id, deadline)
            if error := await self._answer():
                raise ConnectionBroken(str(error))
            self._incoming = Incoming(connection)
        return self._incoming

    async def _wave(self, prompts: Sequence[Prompt], whole_share: float) -> None:
        """Transfer each prompt at the same time, some of them damaged."""
        incoming = await self._connected()
        free = list(range(NUM_PAGES))
        self._random.shuffle(free)
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                pages = free[index * SEQUENCE_PAGES : (index + 1) * SEQUENCE_PAGES]
                is_whole = self._random.random() < whole_share
                injuries = () if is_whole else self._injuries()
                group.create_task(self._transfer(incoming, index, prompt, pages, injuries))

    def _injuries(self) -> tuple[Damage, ...]:
        """Return damage to some pages of a chunk; the rarest kind so far comes next."""
        places = self._random.sample(range(CHUNK_PAGES), self._random.randint(2, CHUNK_PAGES))
        injuries: list[Damage] = []
        planned = self.count.injected.copy()
        while places:
            able = [kind for kind, (_, pages, _) in KINDS.items() if pages <= len(places)]
            kind = min(able, key=lambda each: planned[each])
            num = KINDS[kind][1]
            injuries.append(Damage(kind=kind, places=tuple(places[:num])))
            planned[kind] += num
            places = places[num:]
        return tuple(injuries)

    async def _transfer(
        self,
        incoming: Incoming,
        index: int,
        prompt: Prompt,
        pages: Sequence[int],
        injuries: tuple[Damage, ...],
    ) -> None:
        self._num_transfers += 1
        ticket = Ticket(
            transfer_id=self._num_transfers.to_bytes(16, "big"),
            attempt=0,
            sender_incarnation=1,
            receiver_incarnation=2,
        )
        begin = Begin(
            ticket=ticket,
            prompt=index,
            chunk=self._random.randrange(PROMPT_PAGES // CHUNK_PAGES),
            injuries=injuries,
            seed=self._random.getrandbits(32),
        )
        committed = 0

        def commit(num_pages: int) -> None:
            nonlocal committed
            committed = num_pages

        receiver = self._receivers[ticket] = Receiver(
            ticket=ticket,
            page_ids=pages[:PROMPT_PAGES],
            first_page=0,
            storage=self._storage,
            incoming=incoming,
            send=self._line.send,
            on_commit=commit,
            deadlines=DEADLINES,
            digests=self._digests,
        )
        ended = self._ended[ticket] = asyncio.get_running_loop().create_future()
        self._line.send(begin)
        error: TransferError | None = None
        try:
            await receiver.run()
        except TransferError as failure:
            error = failure
        await receiver.driver.wait_quiescent()
        told = await asyncio.wait_for(ended, ANSWER_S)
        del self._receivers[ticket]
        here = page_sums(self._storage, pages[:committed])
        sums = prompt.computed.page_sums
        self.count.wrong_commits += sum(a != b for a, b in zip(here, sums, strict=False))
        if injuries:
            self._judge(begin, told, error, committed)
            return
        self.count.whole_transfers += 1
        self.count.whole_pages += committed
        if error is None and committed == PROMPT_PAGES:
            prompt.pages = pages
        else:
            self.count.failed_whole_transfers += 1

    def _judge(
        self, begin: Begin, told: Ended, error: TransferError | None, committed: int
    ) -> None:
        """Count the damaged pages, and whether the receiver has found them."""
        places = sorted(place for each in begin.injuries for place in each.places)
        first_page = begin.chunk * CHUNK_PAGES
        is_found = False
        if isinstance(error, DigestMismatch) and (found := FOUND.search(str(error))):
            chunk, num, first = map(int, found.groups())
            is_found = (chunk, num, first) == (begin.chunk, len(places), first_page + places[0])
        if told.num_injuries != len(places):
            raise RuntimeError(
                f"{told.num_injuries} of {len(places)} pages were sent wrong: {told}"
            )
        self.count.transfers += 1
        for each in begin.injuries:
            self.count.injected[each.kind] += len(each.places)
            if is_found and committed <= first_page:
                self.count.found[each.kind] += len(each.places)
        if not is_found or committed > first_page:
            self.count.missed.append(f"{begin.injuries}: {error}; {committed} committed")

    def _decode(self, prompt: Prompt) -> None:
        """Decode from undamaged pages, after the first token, which the sender drew."""
        expected = prompt.computed.output_token_ids
        output = []
        if prompt.pages:
            output = go_on(self._engine, prompt.token_ids, prompt.pages, expected[:1])
        self.count.tokens += len(expected)
        self.count.wrong_tokens += sum(a != b for a, b in zip(output, expected, strict=False))
        self.count.wrong_tokens += len(expected) - len(output)


def measure(
    num_pages: int, *, devices: Sequence[str] = ("cpu", "cpu"), transport: str = "", seed: int = 1
) -> tuple[Count, Row]:
    """Damage pages between two processes; return the outcome and the transport.

    Args:
        num_pages: How many, at least.
        devices: The devices of the sender and of the receiver, which is this process.
        transport: Its name; empty: the best that they have.
        seed: Seed of prompts and damage.

    Raises:
        NoTransport: There is no transport of that name.
    """
    context = multiprocessing.get_context("spawn")
    sides = [
        Side(
            model=demo_model_dir(),
            device=each,
            transport=transport,
            lives_apart=devices[0] == devices[1],
        )
        for each in devices
    ]
    ours, theirs = context.Pipe()
    sender = context.Process(target=damaging_sender.main, args=(theirs, sides[0]), daemon=True)

    async def receive() -> tuple[Count, Row]:
        corruption = Corruption(sides[1], ours, seed)
        await corruption.run(num_pages)
        return corruption.count, {
            "transport": corruption.transport,
            "devices": list(devices),
            "page_bytes": corruption.page_bytes,
            "chunk_pages": CHUNK_PAGES,
        }

    with ExitStack() as stack:
        sender.start()
        theirs.close()
        stack.callback(sender.join)
        stack.callback(sender.kill)
        return asyncio.run(receive())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--pages", type=int, default=PAGES, help="least number of pages to damage")
    parser.add_argument(
        "--devices",
        nargs=2,
        default=["cpu", "cpu"],
        metavar=("SENDER", "RECEIVER"),
        help="devices of sender and receiver, as in 'cuda:0 cuda:1'",
    )
    parser.add_argument(
        "--transport", default="", help="name of the transport; default: the best of these devices"
    )
    parser.add_argument("--seed", type=int, default=1)
    add_commit(parser)
    options = parser.parse_args()
    found = conditions("corruption", options.commit)  # before this process hides GPUs from itself
    try:
        count, configuration = measure(
            options.pages,
            devices=options.devices,
            transport=options.transport,
            seed=options.seed,
        )
    except NoTransport as error:
        raise SystemExit(f"error: {error}") from None
    head = {
        **found,
        "configuration": {
            "model": "demo model",
            **configuration,
            "prompt_tokens": PROMPT_PAGES * PAGE_SIZE,
            "output_tokens": OUTPUT_TOKENS,
        },
    }
    results = ResultFile(options.out, head)
    for row in count.rows():
        results.add(row)


if __name__ == "__main__":
    main()
