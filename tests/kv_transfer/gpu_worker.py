"""A process with one GPU that does what the test tells it through a pipe."""

import asyncio
import multiprocessing
import os
import random
import threading
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any, Self

PAGES = 512
ALL = list(range(PAGES))
CHUNK_PAGES = 100  # of an operation; those of a move are posted at once
KEY = bytes(32)


class Worker:
    """The test's handle of a process; `tell` and `hear` are separate, so that two can meet."""

    def __init__(self, device: int, seed: int, name: str, **options: Any) -> None:
        """Start it; `name` and `options` are those of its transport."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_main, args=(theirs, device, seed, name, options), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def tell(self, command: str, *arguments: object) -> None:
        self.pipe.send((command, arguments))

    def hear(self, timeout_s: float = 120.0) -> Any:
        assert self.pipe.poll(timeout_s), "the worker does not answer"
        return self.pipe.recv()

    def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def connect(sender: Worker, receiver: Worker, connection_id: str) -> None:
    offer = receiver.ask("offer", connection_id)
    receiver.tell("accept", connection_id)
    sender.tell("connect", connection_id, offer)
    assert receiver.hear() is None
    assert sender.hear() is None


def move(sender: Worker, receiver: Worker, source: list[int], target: list[int]) -> None:
    sender.tell("send", source, 10.0)
    receiver.tell("receive", target, 10.0)
    assert sender.hear() is None
    assert receiver.hear() is None


def check_moves(sender: Worker, receiver: Worker) -> None:
    """Move pages in amounts of all kinds; at the end both workers stop."""
    connect(sender, receiver, "c0")
    generator = random.Random(0)
    for num_pages in (1, 2, 16, 17, 300):
        source = generator.sample(ALL, num_pages)
        target = generator.sample(ALL, num_pages)
        others = sorted(set(ALL) - set(target))
        before = receiver.ask("digest", others)

        move(sender, receiver, source, target)

        assert receiver.ask("digest", target) == sender.ask("digest", source)
        assert receiver.ask("digest", others) == before
    sender.tell("stop")
    receiver.tell("stop")
    assert sender.hear() is None
    assert receiver.hear() is None


def check_death_of_sender(
    sender: Worker, receiver: Worker, start_again: Callable[[], Worker], *, abort_s: float
) -> None:
    """Kill the sender while it sends; the receiver must abort in time, compute, and go on.

    Args:
        start_again: Starts the sender's successor.
        abort_s: The longest that the abort may take.
    """
    connect(sender, receiver, "c0")
    move(sender, receiver, ALL, ALL)  # compiles kernels, which takes seconds
    receiver.tell("receive until broken", ALL, 2.0)
    sender.tell("send for ever", ALL)
    assert not receiver.pipe.poll(1.0)

    sender.kill()

    assert receiver.hear() > 0
    assert receiver.ask("abort") < abort_s
    assert receiver.ask("compute") == 1024.0
    with start_again() as again:
        connect(again, receiver, "c1")
        move(again, receiver, ALL[:100], ALL[100:200])
        assert receiver.ask("digest", ALL[100:200]) == again.ask("digest", ALL[:100])


async def in_chunks(
    operation: Callable[[list[int], float], Awaitable[None]], page_ids: list[int], seconds: float
) -> None:
    """Send or receive pages by operations that are posted at once."""
    starts = range(0, len(page_ids), CHUNK_PAGES)
    await asyncio.gather(*(operation(page_ids[at : at + CHUNK_PAGES], seconds) for at in starts))


def _main(pipe: Pipe, device: int, seed: int, name: str, options: dict[str, Any]) -> None:
    # Kernels that are first loaded while a transfer hangs would hang with it.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    asyncio.run(_serve(pipe, device, seed, name, options))


async def _serve(pipe: Pipe, device: int, seed: int, name: str, options: dict[str, Any]) -> None:
    import torch

    from benchmarks.altered_workers import live_apart
    from kv_cache.layout import KVLayout
    from kv_cache.torch_storage import TorchPageStorage
    from kv_transfer.cuda_ipc import CudaIpcTransport
    from kv_transfer.errors import ConnectionBroken
    from kv_transfer.nccl import NcclTransport
    from kv_transfer.proven_sockets import ProvenSockets
    from kv_transfer.transport import Connection, Transport
    from tests.kv_transfer.late_kernel import launch_late

    if torch.cuda.device_count() == 1:
        device = 0
        live_apart()
    torch.cuda.set_device(device)
    layout = KVLayout(
        num_layers=4,
        num_kv_heads=8,
        page_size=16,
        head_dim=128,
        dtype="bfloat16",
        model_fingerprint="test",
    )
    storage = TorchPageStorage(layout, PAGES, f"cuda:{device}")
    storage.pages.normal_(generator=torch.Generator(storage.device).manual_seed(seed))
    matrix = torch.ones(1024, 1024, device=storage.device)
    assert float((matrix @ matrix)[0, 0]) == 1024.0
    torch.cuda.synchronize()
    transport: Transport
    if name == "nccl":
        transport = NcclTransport(storage, **options)
    else:
        transport = CudaIpcTransport(storage, ProvenSockets(host="127.0.0.1"), **options)
    loop = asyncio.get_running_loop()
    connections: list[Connection] = []  # the newest one moves pages, the oldest is aborted first
    while True:
        command, arguments = await asyncio.to_thread(pipe.recv)
        answer: Any = None
        started_at = loop.time()
        try:
            match command, arguments:
                case "offer", (connection_id,):
                    answer = transport.offer(connection_id, KEY)
                case "accept", (connection_id,):
                    connections.append(await transport.accept(connection_id, loop.time() + 30))
                case "connect", (connection_id, offer):
                    connections.append(
                        await transport.connect(connection_id, offer, KEY, loop.time() + 30)
                    )
                case "send", (page_ids, seconds):
                    await in_chunks(connections[-1].send, page_ids, seconds)
                case "receive", (page_ids, seconds):
                    await in_chunks(connections[-1].receive, page_ids, seconds)
                case "send for ever", (page_ids,):
                    while True:
                        await in_chunks(connections[-1].send, page_ids, 5.0)
                case "receive until broken", (page_ids, seconds):
                    answer = 0
                    while True:
                        try:
                            await in_chunks(connections[-1].receive, page_ids, seconds)
                        except ConnectionBroken:
                            break
                        answer += 1
                case "load a kernel after", (seconds,):
                    threading.Timer(seconds, launch_late, [storage.device]).start()
                case "abort", ():
                    await connections.pop(0).abort()
                    answer = loop.time() - started_at
                case "digest", (page_ids,):
                    answer = storage.digest_pages(page_ids)
                case "free bytes", ():
                    answer = torch.cuda.mem_get_info()[0]
                case "reserved bytes", ():
                    answer = torch.cuda.memory_reserved(), _bytes_in_pool(storage.words.device)
                case "compute", ():
                    answer = float((matrix @ matrix)[0, 0])
                case "stop", ():
                    await transport.close()
                    pipe.send(None)
                    return
        except Exception as error:
            answer = error
        pipe.send(answer)


def _bytes_in_pool(device: Any) -> int:
    """Return the bytes that CUDA's own pool holds, used or not."""
    from cuda.bindings import runtime

    from kv_transfer.cuda_runtime import called

    pool = called("the pool", runtime.cudaDeviceGetDefaultMemPool(device.index))
    reserved = runtime.cudaMemPoolAttr.cudaMemPoolAttrReservedMemCurrent
    return int(called("its bytes", runtime.cudaMemPoolGetAttribute(pool, reserved)))
