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
    """Return scale_log2 and soft_cap_log2 as attention kernels take them.

    Without a cap the exponent is score * scale_log2. With one, scale_log2 is the factor inside
    `capped` of jit/attention_state.py, and soft_cap_log2 the one outside.
    """
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / soft_cap, soft_cap * LOG2_E


def on_hopper(tensor: Tensor) -> bool:
    """Tell whether a tensor lies on a GPU with wgmma and the tensor copy engine of Hopper."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == 9


@functools.cache
def programs_for(device: torch.device, programs_per_sm: int) -> int:
    """Return how many programs run at once; a few where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


class PlanBuffer:
    """A fixed int32 buffer on the device; filling it waits for nothing but its own last copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._host_buffer = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._host_array: NDArray[np.int32] = self._host_buffer.numpy()
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def host(self) -> NDArray[np.int32]:
        """Return what `send` copies, to be written; waits until the last copy has left it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host_array

    def send(self, used: int) -> None:
        """Copy the first `used` integers on the current stream."""
        self.device_buffer[:used].copy_(self._host_buffer[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def to_device(table: NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy a plan to the device of the launch without waiting for it."""
    tensor = torch.from_numpy(table)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
