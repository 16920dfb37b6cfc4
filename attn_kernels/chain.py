"""Launches that are scheduled before the launch before them has ended.

A chained launch is scheduled once each program of the launch before it has ended or has released
its dependents. Before it reads or writes anything, it waits until that launch has ended and its
results are visible. It releases its own dependents only after this wait, or at its end. The gain is
the time in which a launch is set up. At most two launches of a chain run at once, and all earlier
ones have ended. Attention over shared prefixes and the decode kernel after it have an arrangement
of their own (OVERLAPS).

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from typing import Any

import triton
from torch import Tensor
from triton.language.extra import cuda

from attn_kernels.tiles import major_capability


def chained(tensor: Tensor) -> dict[str, Any]:
    """Return options of a launch on the tensor's device: of Triton, and of the kernel."""
    return {"launch_pdl": True, "IS_CHAINED": True} if may_chain(tensor) else {"IS_CHAINED": False}


def may_chain(tensor: Tensor) -> bool:
    """Return whether launches on the tensor's device can be chained."""
    return tensor.is_cuda and major_capability(tensor.device) >= 9


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def wait_for_launch_before() -> None:
    """Wait for the launch before, then let the next one be scheduled.

    Every program of a chained kernel waits, by this or by `gdc_wait` alone. If all ended without
    waiting, the next launch could run beside the one before.
    """
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
