"""The device side of an NCCL connection: communicator, streams, staging slabs.

    sender    pages --gather--> slab --send-->         copy stream, wire stream
    receiver                    --receive--> slab --scatter--> pages

Two slabs alternate, so that the copy of one message overlaps the wire time of the next. Everything
is enqueued ahead and ordered by events; the host only polls the last event and the communicator.
Slabs belong to one connection: none that an aborted message still writes can be given to another.

A message hangs if its peer has died. A thread that loads a kernel then waits for the message, and a
thread that destroys an event waits for the one that loads. Only an abort ends the message, and it
waits until the polling thread has let go of the connection. So that thread destroys no event: each
operation records those of the one before again.
"""

import importlib
import math
import time
from collections.abc import Sequence
from typing import Any

import torch  # NOTE: before nccl4py, which then uses the libnccl that torch has loaded
from torch import Tensor

from kv_cache.page_storage import PageStorage
from kv_cache.torch_storage import TorchPageStorage
from kv_transfer.cuda_runtime import OwnMemory, OwnStreams
from kv_transfer.errors import ConnectionBroken, TransportRefused
from kv_transfer.polling_thread import Steps

cuda: Any = torch.cuda  # its streams and events are not typed

MAX_CTAS = 16  # many for a short time disturb other kernels less than few for long
WARM_UP_BYTES = 4096
IDLE_POLL_S = 0.001


class NcclDevice:
    """One GPU with its pages; implements `kv_transfer.nccl.Device`."""

    def __init__(self, storage: PageStorage) -> None:
        if not isinstance(storage, TorchPageStorage) or storage.device.type != "cuda":
            raise TransportRefused("transport nccl needs pages in the memory of a CUDA device")
        try:
            self.core: Any = importlib.import_module("nccl.core")
            self.result: Any = importlib.import_module("nccl.bindings.nccl").Result
            # Apart: torch keeps memory for each stream of copies, on which page ids lie.
            self.wire_streams = OwnStreams(storage.device)
            self.copy_streams = OwnStreams(storage.device)
            self.memory = OwnMemory(storage.words.device)
        except ImportError as error:
            raise TransportRefused(
                "transport nccl needs nccl4py: install pagewire[cuda], then run `pagewire doctor`"
            ) from error
        self._storage = storage
        self.device = storage.device
        self.page_bytes = storage.page_bytes
        self.words = storage.words
        libnccl = self.core.get_version().libnccl
        if libnccl is None:
            raise TransportRefused("libnccl.so.2 is missing; torch for CUDA brings it as a wheel")
        major, minor, patch = libnccl.version.release
        self.nccl_version: int = major * 10_000 + minor * 100 + patch

    def warm_up(self) -> Steps[None]:
        """Load the kernels of copies and digests; page 0 is copied onto itself."""
        cuda.set_device(self.device)
        # Those of two connections: one may begin before another that broke has ended. What the
        # streams and their page ids take is then taken from the start.
        wires = [self.wire_streams.take() for _ in range(2)]
        copies = [self.copy_streams.take() for _ in range(2)]
        for stream in copies:
            with cuda.stream(stream):
                page_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        # On the last stream, with its ids:
        slab = self.memory.take(self.words.shape[1], stream)
        with cuda.stream(stream):
            gather(self.words, page_ids, slab[None])
            scatter(slab[None], page_ids, self.words)
        for num_pages in (1, 2, 16):  # Triton may compile each of these on its own
            self._storage.digest_pages([0] * num_pages)
        while not stream.query():
            yield
        self.memory.give_back(slab, stream)
        for each in wires:
            self.wire_streams.give_back(each)
        for each in copies:
            self.copy_streams.give_back(each)

    def unique_id(self) -> bytes:
        return bytes(self.core.get_unique_id())

    def link(
        self, name: str, *, is_sender: bool, unique_id: bytes, pages_in_message: int
    ) -> "NcclLink":
        return NcclLink(self, name, is_sender, unique_id, pages_in_message)


class NcclLink:
    """One communicator of two ranks; implements `kv_transfer.nccl.Link`."""

    def __init__(
        self,
        device: NcclDevice,
        name: str,
        is_sender: bool,
        unique_id: bytes,
        pages_in_message: int,
    ) -> None:
        self._device = device
        self._name = name
        self._rank, self._peer = (1, 0) if is_sender else (0, 1)
        self._is_sender = is_sender
        self._unique_id = unique_id
        self._pages_in_message = pages_in_message
        self._communicator: Any = device.core.Communicator()
        self._wire, self._copy = device.wire_streams.take(), device.copy_streams.take()
        self._memory: Tensor | None = None  # of both slabs
        self._slabs: tuple[Tensor, ...] = ()
        # Held until the next operation: copies that an abort leaves behind still read them.
        self._ids: list[Tensor] = []
        self._events: list[Any] = []  # the first of them are recorded by the running operation
        self._num_recorded = 0

    def open(self) -> Steps[None]:
        core = self._device.core
        config = core.NCCLConfig(blocking=False, max_ctas=MAX_CTAS, comm_name=self._name)
        self._communicator.initialize(
            2, self._rank, core.UniqueId.from_bytes(self._unique_id), config
        )
        yield from self._settled()
        shape = (self._pages_in_message, self._device.words.shape[1])
        self._memory = self._device.memory.take(2 * math.prod(shape), self._wire)
        self._slabs = tuple(self._memory.view(2, *shape))
        # A first message makes NCCL connect the peers and load its kernel while both live.
        first = self._bytes(self._slabs[0])[:WARM_UP_BYTES]
        yield from self._move(first, is_send=self._is_sender)
        yield from self._reached(self._recorded(self._wire))

    def send(self, page_ids: Sequence[int]) -> Steps[None]:
        free: list[Any] = [None, None]  # recorded when the slab may be written again
        for turn, some in enumerate(self._messages(page_ids)):
            slab = self._slabs[turn % 2][: len(some)]
            with cuda.stream(self._copy):
                if (event := free[turn % 2]) is not None:
                    self._copy.wait_event(event)
                gather(self._device.words, some, slab)
            self._wire.wait_event(self._recorded(self._copy))
            yield from self._move(self._bytes(slab), is_send=True)
            free[turn % 2] = self._recorded(self._wire)
        yield from self._reached(self._recorded(self._wire))

    def receive(self, page_ids: Sequence[int]) -> Steps[None]:
        free: list[Any] = [None, None]  # recorded when the slab may be written again
        for turn, some in enumerate(self._messages(page_ids)):
            slab = self._slabs[turn % 2][: len(some)]
            if (event := free[turn % 2]) is not None:
                self._wire.wait_event(event)
            yield from self._move(self._bytes(slab), is_send=False)
            with cuda.stream(self._copy):
                self._copy.wait_event(self._recorded(self._wire))
                scatter(slab, some, self._device.words)
            free[turn % 2] = self._recorded(self._copy)
        yield from self._reached(self._recorded(self._copy))

    def abort(self) -> None:
        cuda.set_device(self._device.device)
        self._communicator.abort()
        # Copies that were enqueued behind the aborted message still run, on quarantined pages.
        while not (self._wire.query() and self._copy.query()):
            time.sleep(IDLE_POLL_S)
        # So others may have their streams, and the device their memory.
        self._slabs, self._ids, self._events = (), [], []
        if self._memory is not None:
            self._device.memory.give_back(self._memory, self._wire)
            self._memory = None
        self._device.wire_streams.give_back(self._wire)
        self._device.copy_streams.give_back(self._copy)

    def _messages(self, page_ids: Sequence[int]) -> list[Tensor]:
        # All before anything is enqueued, since a copy to the device would then wait for the wire;
        # each a tensor of its own, since Triton compiles again for another alignment.
        step = self._pages_in_message
        self._num_recorded = 0
        with cuda.stream(self._copy):
            self._ids = [
                torch.tensor(page_ids[i : i + step], dtype=torch.int64, device=self._device.device)
                for i in range(0, len(page_ids), step)
            ]
        return self._ids

    def _move(self, message: Tensor, *, is_send: bool) -> Steps[None]:
        stream = self._wire.cuda_stream
        if is_send:
            self._communicator.send(message, self._peer, stream=stream)
        else:
            self._communicator.recv(message, self._peer, stream=stream)
        yield from self._settled()

    def _settled(self) -> Steps[None]:
        """Wait until the communicator has taken the last call; only then may another follow."""
        while (state := self._communicator.get_async_error()) == self._device.result.InProgress:
            yield
        if state != self._device.result.Success:
            raise ConnectionBroken(f"NCCL reports {state.name} on connection {self._name!r}")

    def _reached(self, event: Any) -> Steps[None]:
        while not event.query():
            yield from self._settled()
            yield

    def _recorded(self, stream: Any) -> Any:
        """Return an event after what the stream has got so far; valid during this operation."""
        if self._num_recorded == len(self._events):
            self._events.append(cuda.Event())
        event = self._events[self._num_recorded]
        self._num_recorded += 1
        event.record(stream)
        return event

    @staticmethod
    def _bytes(slab: Tensor) -> Tensor:
        return slab.view(-1).view(torch.uint8)


def gather(words: Tensor, page_ids: Tensor, slab: Tensor) -> None:
    """Copy pages into the slab, on the current stream."""
    # Imported here: loads Triton, which hosts without GPUs do not need.
    from attn_kernels.pages.launch import gather_pages

    gather_pages(words, page_ids, slab)


def scatter(slab: Tensor, page_ids: Tensor, words: Tensor) -> None:
    """Copy the slab into pages, on the current stream."""
    from attn_kernels.pages.launch import scatter_pages

    scatter_pages(slab, page_ids, words)
