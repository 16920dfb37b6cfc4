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


@functools.cache
def programs_for(device: torch.device, programs_per_sm: int) -> int:
    """Return how many programs run at once; a few where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


def to_device(table: NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy a plan to the device of the launch without waiting for it."""
    tensor = torch.from_numpy(table)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
