"""Reads tensors of files to a GPU, several pieces at once, through pinned memory.

A copy out of a mapped file waits for one thread of the driver, which moves it to pinned memory page
by page. Here several threads read the file into pinned memory, each while the GPU fetches what
others have read.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

NUM_LANES = 4
PIECE_BYTES = 16 * 2**20  # read by a lane at once; a single row may be larger


class PinnedReader:
    """Fills tensors in threads of its own; `reading_pinned` makes one, and ends it."""

    def __init__(self, device: torch.device) -> None:
        self._files: dict[Path, int] = {}  # path |-> descriptor
        self._threads = ThreadPoolExecutor(NUM_LANES, "read-weights")
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        for _ in range(NUM_LANES):
            self._lanes.put(_Lane(device))

    def fill(self, out: Tensor, path: Path, begin: int) -> list[Future[None]]:
        """Begin to fill a tensor, and return its pieces, which end in any order.

        Args:
            out: Of the type in the file, with at least one element. Its rows may lie apart from
                each other. It is filled once its pieces have ended and the reader has been left.
            path: The file.
            begin: Byte in the file at which the tensor begins.

        Raises:
            OSError: The file cannot be opened. Pieces raise it if the file cannot be read, and
                EOFError if it ends too soon.
        """
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        file = self._files[path]
        row_bytes = out[0].numel() * out.element_size()
        num_rows = max(1, PIECE_BYTES // row_bytes)
        return [
            self._threads.submit(self._fill, rows, file, begin + index * num_rows * row_bytes)
            for index, rows in enumerate(torch.split(out, num_rows))
        ]

    def close(self) -> None:
        """Begin no further piece, and wait for those that have begun."""
        self._threads.shutdown(cancel_futures=True)
        while not self._lanes.empty():
            self._lanes.get().wait()
        for file in self._files.values():
            os.close(file)

    def _fill(self, rows: Tensor, file: int, begin: int) -> None:
        lane = self._lanes.get()
        try:
            lane.fill(rows, file, begin)
        finally:
            self._lanes.put(lane)


class _Lane:
    """A piece of pinned memory; one thread at a time uses it."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._fetched: torch.cuda.Event | None = None  # what was read last

    def fill(self, rows: Tensor, file: int, begin: int) -> None:
        num_bytes = rows.numel() * rows.element_size()
        self.wait()
        if len(self._memory) < num_bytes:
            size = max(num_bytes, PIECE_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        memory = self._memory[:num_bytes]
        _read(file, begin, memory.numpy().data)
        rows.copy_(memory.view(rows.dtype).view(rows.shape), non_blocking=True)
        if rows.is_cuda:
            with torch.cuda.device(rows.device):
                self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._fetched.record()

    def wait(self) -> None:
        """Wait until the GPU has fetched what was read last."""
        if self._fetched is not None:
            self._fetched.synchronize()


@contextmanager
def reading_pinned(device: torch.device) -> Iterator[PinnedReader]:
    """Have a reader while entered; what it has read is on the device afterwards."""
    reader = PinnedReader(device)
    try:
        yield reader
    finally:
        reader.close()


def _read(file: int, begin: int, target: memoryview) -> None:
    num_read = 0
    while num_read < len(target):
        just_read = os.preadv(file, [target[num_read:]], begin + num_read)
        if not just_read:
            raise EOFError("cut off while it was read")
        num_read += just_read
