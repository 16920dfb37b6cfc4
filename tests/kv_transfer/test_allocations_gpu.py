"""On which streams transfers and digests allocate memory of the device.

torch gives out what is freed on a stream to the next one who allocates on that stream, at once and
in any thread. So memory that is used on another stream than its own may still be used elsewhere.
"""

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_cache.torch_storage
import kv_transfer.cuda_ipc_memory
import kv_transfer.nccl_link
from attn_kernels.pages.launch_digest import digest_pages
from kv_cache.layout import KVLayout
from kv_cache.torch_storage import TorchPageStorage
from kv_transfer.cuda_ipc_memory import CudaMemory, CudaPeerPages
from kv_transfer.nccl_link import NcclDevice, NcclLink
from tests.kv_transfer.no_nccl import device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NUM_PAGES = 8
NCCL, IPC, STORAGE = (
    str(Path(module.__file__ or ""))
    for module in (kv_transfer.nccl_link, kv_transfer.cuda_ipc_memory, kv_cache.torch_storage)
)


def make_storage() -> TorchPageStorage:
    layout = KVLayout(
        num_layers=2,
        num_kv_heads=2,
        page_size=16,
        head_dim=64,
        dtype="bfloat16",
        model_fingerprint="m",
    )
    return TorchPageStorage(layout, NUM_PAGES, "cuda:0", digest_kernel=digest_pages)


def streams_by_file(trace: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Return on which streams each of the files allocated; a call's innermost file counts."""
    found = defaultdict(set)
    for entry in trace:
        if entry["action"] == "alloc":
            files = [frame["filename"] for frame in entry.get("frames", ())]
            innermost = next((each for each in files if each in (NCCL, IPC, STORAGE)), "")
            found[innermost].add(entry["stream"])
    return found


def test_transfers_and_digests_allocate_on_streams_of_their_own() -> None:
    storage, source = make_storage(), make_storage()
    device = device_of(storage.words)
    device._storage = storage
    memory = CudaMemory(storage)
    peer = CudaPeerPages(memory, source.pages.data_ptr(), 0, NUM_PAGES, is_same_gpu=True)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        for _ in NcclDevice.warm_up(device):
            pass
        link = NcclLink(device, "c0", True, bytes(128), 2)
        for steps in (link.open, lambda: link.send(range(5)), lambda: link.receive(range(5))):
            for _ in steps():
                pass
        own = {each.cuda_stream for each in (link._copy, *device.copy_streams._idle)}
        peer.copy([0, 1, 2], [5, 6, 7])
        thread = threading.Thread(target=storage.digest_pages, args=(range(NUM_PAGES),))
        thread.start()
        thread.join()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    link.abort()

    found = streams_by_file(trace)

    assert found[NCCL] == own
    assert found[IPC] == {peer._stream.cuda_stream}
    assert found[STORAGE] == {storage._digest_stream.cuda_stream}
