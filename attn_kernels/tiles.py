"""Arithmetic that launchers share."""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOG2_E = 1.4426950408889634  # kernels use exp2 and log2: one instruction each


def padded(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return scale_log2 and soft_cap_log2 for attention kernels.

    Without a cap the exponent is score * scale_log2. With one, scale_log2 is the factor inside
    `capped` of attention_state.py, and soft_cap_log2 the one outside.
    """
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / soft_cap, soft_cap * LOG2_E


def on_hopper(tensor: Tensor) -> bool:
    """Return whether a tensor lies on a GPU with Hopper's wgmma and tensor copy engine."""
    return tensor.is_cuda and major_capability(tensor.device) == 9


@functools.cache
def major_capability(device: torch.device) -> int:
    """Return the first number of the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def programs_for(device: torch.device, programs_per_sm: int) -> int:
    """Return how many programs run at once; a few without a GPU (in the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


class PlanBuffer:
    """A fixed int32 buffer on the device, filled from one of two buffers on the host in turn.

    So a plan can be made and sent while the previous one waits for its turn on the stream. The host
    waits only if it is two plans ahead of the device.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [
            torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._turn = 0

    def host(self) -> NDArray[np.int32]:
        """Return the buffer that `send` copies, for writing; waits for its last copy."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        array: NDArray[np.int32] = self._host_buffers[self._turn].numpy()
        return array

    def send(self, used: int) -> None:
        """Copy the first `used` integers on the current stream."""
        host_buffer = self._host_buffers[self._turn]
        self.device_buffer[:used].copy_(host_buffer[:used], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record()
        self._turn = 1 - self._turn


def to_device(values: NDArray[np.number], device: torch.device) -> Tensor:
    """Copy an array to the device of the launch without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
