"""Streams and memory of a GPU that belong to transfers alone, by CUDA's runtime itself."""

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from kv_transfer.errors import TransportRefused

cuda: Any = torch.cuda  # its streams are not typed


def called(name: str, returned: Any) -> Any:
    """Return what a CUDA function returned after its error code; raises TransportRefused."""
    code, *values = returned
    if int(code):
        raise TransportRefused(f"{name} failed: {code}")
    return values[0] if len(values) == 1 else tuple(values)


def words_at(address: int, num_words: int, device: torch.device) -> Tensor:
    """Return 32-bit words of a device's memory as a tensor, [num_words] int32, that owns none."""
    return torch.as_tensor(_Described(address, num_words), device=device)


class OwnStreams:
    """Streams of one GPU that nothing else uses; any thread may call it.

    torch's own streams come from a pool of 32 and are given out again: work of the engine could
    find itself behind a transfer. And torch keeps at least 2 MiB of memory for each stream on which
    it was ever allocated, so those that were given back come first, and none is destroyed.

    Raises:
        ImportError: cuda.bindings is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        self._device = device
        self._idle: list[Any] = []

    def take(self) -> Any:
        """Return a torch stream that does not wait for the default stream, nor that for it.

        Raises:
            TransportRefused: CUDA has made none.
        """
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        runtime = self._runtime
        with cuda.device(self._device):
            made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        number = int(called("cudaStreamCreateWithFlags", made))
        return cuda.ExternalStream(number, device=self._device)

    def give_back(self, stream: Any) -> None:
        """Keep an idle stream for the next one who takes one."""
        self._idle.append(stream)


class OwnMemory:
    """Memory of one GPU for the buffers of connections; any thread may call it.

    torch's allocator would keep what a connection has left. On a stream it also gives out memory
    that work still running there uses. Neither call waits for the device, as cudaFree would: for
    the message of another connection, perhaps, whose peer has died.

    Args:
        device: With its number.

    Raises:
        ImportError: cuda.bindings is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        self._device = device

    def take(self, num_words: int, stream: Any) -> Tensor:
        """Return memory, [num_words] int32, for work that the stream orders.

        Raises:
            TransportRefused: CUDA gives none, mostly because the memory is full.
        """
        with cuda.device(self._device):
            given = self._runtime.cudaMallocAsync(num_words * 4, stream.cuda_stream)
        return words_at(int(called("cudaMallocAsync", given)), num_words, self._device)

    def give_back(self, memory: Tensor, stream: Any) -> None:
        """Return memory to the device. The stream must be idle: else this waits inside CUDA.

        Raises:
            TransportRefused: CUDA has refused it, mostly because the device is lost.
        """
        with cuda.device(self._device):
            freed = self._runtime.cudaFreeAsync(memory.data_ptr(), stream.cuda_stream)
            called("cudaFreeAsync", freed)
            stream.synchronize()  # only then does CUDA's pool let go of it; a query is not enough


class _Described:
    """Words at an address, as torch takes them without a copy."""

    def __init__(self, address: int, num_words: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_words,),
            "typestr": "<i4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
