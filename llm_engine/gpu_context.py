"""Makes the context of a process's GPU while torch is imported: each takes seconds.

The import holds Python's lock, which the driver does not need.
"""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TORCH = "torch._C"  # once it is imported, CUDA's runtime knows the kernels of torch's libraries
LOOK_PERIOD_S = 0.01
LONGEST_S = 60.0  # after the import; a driver that takes longer is left to torch


@contextmanager
def making_context() -> Iterator[None]:
    """Make the context of the first visible GPU while entered, and load torch's kernels into it.

    They are loaded if torch is imported meanwhile and CUDA_MODULE_LOADING is EAGER. A failure is
    left to torch, which meets it again and explains it.
    """
    has_ended = threading.Event()
    maker = threading.Thread(
        target=_make_context, args=(has_ended,), name="make-context", daemon=True
    )
    maker.start()
    try:
        yield
    finally:
        has_ended.set()
        maker.join(LONGEST_S)


def _make_context(has_ended: threading.Event) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # no driver, or a torch with a runtime of its own
        driver = ctypes.CDLL("libcuda.so.1")
        if (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), 0)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # until the end
        ):
            return
        while TORCH not in sys.modules:
            if has_ended.wait(LOOK_PERIOD_S):
                return
        ctypes.CDLL(None).cudaFree(None)  # frees nothing; the runtime sets itself up first
