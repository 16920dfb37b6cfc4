"""The device side of a CUDA IPC connection: pages as a handle, mapped pages, and the copies.

Pages of the same GPU are copied by one kernel, which keeps its memory busy however small they are.
Pages of another GPU are copied as they are by the copy engines, which take no multiprocessor from
the running steps of either side; pages that follow each other on both sides are one copy. One call
makes all copies of a chunk, in any order: a call for each page would take the CPU half as long as
the device, and would keep the engines in order.
"""

import importlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_cache.page_storage import PageStorage
from kv_cache.torch_storage import TorchPageStorage
from kv_transfer.cuda_runtime import OwnStreams, called, words_at
from kv_transfer.errors import TransportRefused

cuda: Any = torch.cuda  # its streams and events are not typed

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64
_GPU_ID_BYTES = 16  # of a GPU's UUID
_OFFSET_BYTES = 8
_CARD_BYTES = _HANDLE_BYTES + _OFFSET_BYTES + _GPU_ID_BYTES
_BATCH_DRIVER = 12_080  # CUDA 12.8, the first with cudaMemcpyBatchAsync


class CudaMemory:
    """One GPU with its pages; implements `kv_transfer.cuda_ipc.Memory`.

    Raises:
        TransportRefused: When its pages cannot be shared with another process.
    """

    def __init__(self, storage: PageStorage) -> None:
        if not isinstance(storage, TorchPageStorage) or storage.device.type != "cuda":
            raise TransportRefused("transport cuda_ipc needs pages in the memory of a CUDA device")
        try:
            self.runtime: Any = importlib.import_module("cuda.bindings.runtime")
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise TransportRefused(f"transport cuda_ipc needs cuda.bindings: {error}") from error
        self.device = storage.pages.device  # with its number, which the storage's may lack
        self.page_bytes = storage.page_bytes
        self.streams = OwnStreams(self.device)
        driver = called("cudaDriverGetVersion", self.runtime.cudaDriverGetVersion())
        self.copies_in_batches: bool = driver >= _BATCH_DRIVER
        self.words = storage.words
        uuid = cuda.get_device_properties(self.device).uuid
        self._gpu_id = uuid.bytes if isinstance(uuid.bytes, bytes) else bytes(uuid.bytes)
        self.host_id = _BOOT_ID.read_text().strip()

    def card(self) -> bytes:
        cuda.set_device(self.device)
        address = self.words.data_ptr()
        # A handle is that of a whole allocation, in which the pages may begin anywhere.
        pointer = self._driver.CUdeviceptr(address)
        base, _ = called("cuMemGetAddressRange", self._driver.cuMemGetAddressRange(pointer))
        handle = called("cudaIpcGetMemHandle", self.runtime.cudaIpcGetMemHandle(int(base)))
        offset = (address - int(base)).to_bytes(_OFFSET_BYTES, "big")
        return bytes(handle.reserved) + offset + self._gpu_id

    def open(self, card: bytes, num_pages: int) -> "CudaPeerPages":
        if len(card) != _CARD_BYTES:
            raise TransportRefused(f"the card has {len(card)} bytes, must have {_CARD_BYTES}")
        cuda.set_device(self.device)
        handle = self.runtime.cudaIpcMemHandle_t()
        handle.reserved = card[:_HANDLE_BYTES]
        flags = self.runtime.cudaIpcMemLazyEnablePeerAccess
        base = called("cudaIpcOpenMemHandle", self.runtime.cudaIpcOpenMemHandle(handle, flags))
        offset = int.from_bytes(card[_HANDLE_BYTES:-_GPU_ID_BYTES], "big")
        is_same_gpu = card[-_GPU_ID_BYTES:] == self._gpu_id
        try:
            self._check_range(int(base), offset + num_pages * self.page_bytes)
            return CudaPeerPages(self, int(base), offset, num_pages, is_same_gpu)
        except BaseException:
            self.runtime.cudaIpcCloseMemHandle(base)
            raise

    def _check_range(self, base: int, end: int) -> None:
        """Refuse pages beyond the mapped memory: reading them would cost this process its GPU."""
        pointer = self._driver.CUdeviceptr(base)
        returned = self._driver.cuMemGetAddressRange(pointer)
        _, num_bytes = called("cuMemGetAddressRange", returned)
        if end > num_bytes:
            raise TransportRefused(
                f"the card's pages end at byte {end} of their memory, which has {num_bytes}"
            )


class CudaPeerPages:
    """Mapped pages; implements `kv_transfer.cuda_ipc.PeerPages`."""

    def __init__(
        self, memory: CudaMemory, base: int, offset: int, num_pages: int, is_same_gpu: bool
    ) -> None:
        self._memory = memory
        self._base = base
        self._first = base + offset  # address of page 0
        self._words = self._as_tensor(num_pages) if is_same_gpu else None
        self._stream = memory.streams.take()
        # Held while the copies of a call are launched: if those of two calls took turns on the
        # stream, both would end with the last.
        self._launching = threading.Lock()

    def copy(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        if not source_ids:
            return
        cuda.set_device(self._memory.device)  # of this thread
        done = cuda.Event(blocking=True)
        try:
            with self._launching, cuda.stream(self._stream):
                try:
                    if self._words is not None:
                        self._copy_by_kernel(self._words, source_ids, target_ids)
                    else:
                        self._copy_by_engine(source_ids, target_ids)
                finally:
                    done.record()
        finally:
            done.synchronize()  # after an error, too: what was launched before still writes pages

    def close(self) -> None:
        self._words = None
        memory = self._memory
        memory.streams.give_back(self._stream)
        cuda.set_device(memory.device)
        called("cudaIpcCloseMemHandle", memory.runtime.cudaIpcCloseMemHandle(self._base))

    def _copy_by_kernel(
        self, words: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        # Imported here: loads Triton, which hosts without GPUs do not need.
        from attn_kernels.pages.launch import copy_between

        device = self._memory.device
        # One upload for both; the second half is aligned wherever it begins, or it would be
        # compiled again: ids are not specialized on their alignment.
        ids = torch.tensor([source_ids, target_ids], dtype=torch.int64, device=device)
        copy_between(words, ids[0], self._memory.words, ids[1])

    def _copy_by_engine(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        memory = self._memory
        runtime, page_bytes = memory.runtime, memory.page_bytes
        first = memory.words.data_ptr()
        runs = runs_of_pages(source_ids, target_ids)
        sources = [self._first + source_id * page_bytes for source_id, _, _ in runs]
        targets = [first + target_id * page_bytes for _, target_id, _ in runs]
        sizes = [count * page_bytes for _, _, count in runs]
        stream = self._stream.cuda_stream
        if memory.copies_in_batches:
            in_order = runtime.cudaMemcpyAttributes()
            order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
            in_order.srcAccessOrder = order
            returned = runtime.cudaMemcpyBatchAsync(
                targets, sources, sizes, len(runs), [in_order], [0], 1, stream
            )
            called("cudaMemcpyBatchAsync", returned)
            return
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        for target, source, size in zip(targets, sources, sizes, strict=True):
            returned = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
            called("cudaMemcpyAsync", returned)

    def _as_tensor(self, num_pages: int) -> Tensor:
        page_words = self._memory.words.shape[1]
        flat = words_at(self._first, num_pages * page_words, self._memory.device)
        return flat.view(num_pages, page_words)


def runs_of_pages(
    source_ids: Sequence[int], target_ids: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return copies of pages that follow each other on both sides as one each.

    Returns:
        First source page, first target page and number of pages of each run, in order.
    """
    runs: list[tuple[int, int, int]] = []
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        if runs:
            first_source, first_target, count = runs[-1]
            if (source_id, target_id) == (first_source + count, first_target + count):
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source_id, target_id, 1))
    return runs
