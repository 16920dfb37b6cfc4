"""CUDA streams that belong to transfers alone."""

import contextlib
import importlib
from typing import Any

import torch

from kv_transfer.errors import TransportRefused

cuda: Any = torch.cuda  # its streams are not typed


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
            code, made = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        if int(code):
            raise TransportRefused(f"cudaStreamCreateWithFlags failed: {code}")
        return cuda.ExternalStream(int(made), device=self._device)

    def give_back(self, stream: Any) -> None:
        """Keep an idle stream for the next one who takes one."""
        self._idle.append(stream)
