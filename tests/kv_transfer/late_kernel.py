"""A kernel that nothing launches before a test does; its first launch compiles and loads it."""

import torch
import triton
import triton.language as tl


@triton.jit
def late_kernel(out_ptr):
    tl.store(out_ptr, 7)


def launch_late(device: torch.device) -> None:
    """Launch it on a stream of its own, as an engine's thread does."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        late_kernel[(1,)](torch.empty(1, dtype=torch.int32, device=device))
