"""The speed of a transport alone, between two processes and without an engine.

    python -m benchmarks.page_moves --out benchmarks/results/page-moves-h200.json

Both sides take random pages of a pool with random contents. A move is one operation of a
connection: from both sides' call until the receiver has the pages. It excludes the transfer
protocol's digests and messages about each chunk. `connect_ms` is the set-up of a connection.

With two GPUs pages move between them; with one, both processes use it, and NCCL cannot. Without a
GPU they move over TCP. Try it with --pages 4 --page-kib 16.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.measured_host import add_commit, conditions, num_gpus
from benchmarks.result_file import ResultFile, say
from benchmarks.stream_statistics import Row

KEY = bytes(32)
CONNECT_S, MOVE_S, ANSWER_S = 60.0, 30.0, 180.0
WARM_UPS, REPEATS = 3, 15
POOL_PAGES = 2  # times the most that a move takes
HEAD_DIM, LAYERS, DTYPE_BYTES = 128, 32, 2  # of a page


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Settings of one of the two processes."""

    transport: str
    device: str
    page_bytes: int
    num_pages: int
    seed: int


class Process:
    """This process's handle of one of the two."""

    def __init__(self, side: Side) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, side), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: str, *arguments: object) -> None:
        """Begin a command."""
        self._pipe.send((command, arguments))

    def hear(self) -> Any:
        """Return the result of the last command; raises its error."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("a process of the benchmark does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _main(pipe: Pipe, side: Side) -> None:
    asyncio.run(_serve(pipe, side))


async def _serve(pipe: Pipe, side: Side) -> None:
    transport = _make_transport(side)
    loop = asyncio.get_running_loop()
    connection: Any = None
    while True:
        command, arguments = await asyncio.to_thread(pipe.recv)
        answer: Any = None
        begun_at = loop.time()
        try:
            match command, arguments:
                case "offer", (connection_id,):
                    answer = transport.offer(connection_id, KEY)
                case "accept", (connection_id,):
                    connection = await transport.accept(connection_id, begun_at + CONNECT_S)
                    answer = loop.time() - begun_at
                case "connect", (connection_id, offer):
                    deadline = begun_at + CONNECT_S
                    connection = await transport.connect(connection_id, offer, KEY, deadline)
                case "send", (moves,):
                    for page_ids in moves:
                        await connection.send(page_ids, MOVE_S)
                case "receive", (moves,):
                    answer = []
                    for page_ids in moves:
                        begun_at = loop.time()
                        await connection.receive(page_ids, MOVE_S)
                        answer.append(loop.time() - begun_at)
                case "digest", (page_ids,):
                    answer = transport.digests(page_ids)
        except Exception as error:
            answer = error
        pipe.send(answer)


def _make_transport(side: Side) -> Any:
    import torch

    from kv_cache.layout import KVLayout
    from kv_cache.torch_storage import TorchPageStorage
    from kv_transfer.transport import open_transports

    slots = side.page_bytes // (LAYERS * 2 * HEAD_DIM * DTYPE_BYTES)
    layout = KVLayout(
        num_layers=LAYERS,
        num_kv_heads=1,
        page_size=slots,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
        model_fingerprint="random",
    )
    if side.device != "cpu":
        torch.cuda.set_device(side.device)
    storage = TorchPageStorage(layout, side.num_pages, side.device)
    generator = torch.Generator(storage.device).manual_seed(side.seed)
    storage.pages.normal_(generator=generator)
    choice: Any = "auto" if side.transport == "tcp" else side.transport
    device = "cpu" if side.device == "cpu" else "cuda"
    transports = open_transports(storage, device, "127.0.0.1", choice=choice)
    [transport] = [each for each in transports if each.name == side.transport]
    transport.digests = storage.digest_pages  # type: ignore[attr-defined]
    return transport


def measure(transport: str, devices: Sequence[str], page_bytes: int, num_pages: int) -> Row:
    """Return the figures of one transport, page size and number of pages.

    Raises:
        ValueError: The received contents differ from the sent ones.
    """
    pool = POOL_PAGES * num_pages
    sender, receiver = (
        Process(
            Side(
                transport=transport,
                device=device,
                page_bytes=page_bytes,
                num_pages=pool,
                seed=seed,
            )
        )
        for seed, device in enumerate(devices)
    )
    try:
        receiver.tell("offer", "c0")
        offer = receiver.hear()
        receiver.tell("accept", "c0")
        sender.tell("connect", "c0", offer)
        sender.hear()
        connect_s = receiver.hear()
        choose = random.Random(page_bytes + num_pages)  # noqa: S311 - no secret
        moves = [
            [choose.sample(range(pool), num_pages) for _ in range(WARM_UPS + REPEATS)]
            for _ in range(2)
        ]
        sender.tell("send", moves[0])
        receiver.tell("receive", moves[1])
        sender.hear()
        seconds = receiver.hear()[WARM_UPS:]
        sender.tell("digest", moves[0][-1])
        receiver.tell("digest", moves[1][-1])
        if sender.hear() != receiver.hear():
            raise ValueError(f"{transport}: the pages that arrived are not those that were sent")
    finally:
        sender.end()
        receiver.end()
    median = statistics.median(seconds)
    return {
        "case": f"{transport}/{page_bytes // 1024}x{num_pages}",
        "devices": list(devices),
        "gb_per_s": round(page_bytes * num_pages / median / 1e9, 2),
        "ms": round(1e3 * median, 3),
        "min_ms": round(1e3 * min(seconds), 3),
        "max_ms": round(1e3 * max(seconds), 3),
        "repeats": len(seconds),
        "connect_ms": round(1e3 * connect_s, 3),
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--page-kib", type=int, nargs="+", default=[256, 8192])
    add_commit(parser)
    options = parser.parse_args()
    gpus = num_gpus()
    devices = ["cpu", "cpu"] if not gpus else ["cuda:0", "cuda:1" if gpus > 1 else "cuda:0"]
    transports = ["tcp"] if not gpus else ["cuda_ipc", "nccl"][: min(gpus, 2)]
    head = {
        **conditions("page_moves", options.commit),
        "configuration": {"pages": options.pages, "page_kib": options.page_kib},
    }
    results = ResultFile(options.out, head)
    for transport in transports:
        for page_kib in options.page_kib:
            for num_pages in options.pages:
                results.add(measure(transport, devices, page_kib << 10, num_pages))
    say("done")


if __name__ == "__main__":
    main()
