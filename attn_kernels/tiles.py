"""Arithmetic that launchers share."""

import functools

import torch

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
