"""A process with one GPU that does what the test tells it through a pipe."""

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection as Pipe
from typing import Any

PAGES = 512


class Worker:
    """The test's handle of a process; `tell` and `hear` are separate, so that two can meet."""

    def __init__(self, device: int, seed: int, staging_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_main, args=(theirs, device, seed, staging_bytes), daemon=True
        )
        self.process.start()
        theirs.close()

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


def _main(pipe: Pipe, device: int, seed: int, staging_bytes: int) -> None:
    # Kernels that are first loaded while a transfer hangs would hang with it.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    asyncio.run(_serve(pipe, device, seed, staging_bytes))


async def _serve(pipe: Pipe, device: int, seed: int, staging_bytes: int) -> None:
    import torch

    from kv_cache.layout import KVLayout
    from kv_cache.torch_storage import TorchPageStorage
    from kv_transfer.errors import ConnectionBroken
    from kv_transfer.nccl import NcclConnection, NcclTransport

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
    transport = NcclTransport(storage, staging_bytes=staging_bytes)
    loop = asyncio.get_running_loop()
    connection: NcclConnection | None = None
    while True:
        command, arguments = await asyncio.to_thread(pipe.recv)
        answer: Any = None
        started_at = loop.time()
        try:
            match command, arguments:
                case "offer", (connection_id,):
                    answer = transport.offer(connection_id, b"")
                case "accept", (connection_id,):
                    connection = await transport.accept(connection_id, loop.time() + 30)
                case "connect", (connection_id, offer):
                    connection = await transport.connect(
                        connection_id, offer, b"", loop.time() + 30
                    )
                case "send", (page_ids, seconds):
                    assert connection is not None
                    await connection.send(page_ids, loop.time() + seconds)
                case "receive", (page_ids, seconds):
                    assert connection is not None
                    await connection.receive(page_ids, loop.time() + seconds)
                case "send for ever", (page_ids,):
                    assert connection is not None
                    while True:
                        await connection.send(page_ids, loop.time() + 5)
                case "receive until broken", (page_ids, seconds):
                    assert connection is not None
                    answer = 0
                    while True:
                        try:
                            await connection.receive(page_ids, loop.time() + seconds)
                        except ConnectionBroken:
                            break
                        answer += 1
                case "abort", ():
                    assert connection is not None
                    await connection.abort()
                    answer = loop.time() - started_at
                case "digest", (page_ids,):
                    answer = storage.digest_pages(page_ids)
                case "compute", ():
                    answer = float((matrix @ matrix)[0, 0])
                case "stop", ():
                    await transport.close()
                    pipe.send(None)
                    return
        except Exception as error:
            answer = error
        pipe.send(answer)
