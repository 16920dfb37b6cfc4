"""Tells errors after which a device is of no use from those of one pass."""

# Beginnings of what torch, cuBLAS and Triton raise as plain RuntimeErrors.
MARKS = ("CUDA error", "Triton Error [CUDA]", "HIP error")


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable for the rest of the process.

    After an illegal address, a device-side assert or a hardware fault each later call returns the
    same error, and only a new process gets a working context. A lack of memory is no such error.
    torch names them AcceleratorError; the type is not imported, because this runs where no torch
    is, too.

    Source: the descriptions of cudaError_t in the CUDA runtime's reference.
    """
    names = {each.__name__ for each in type(error).__mro__}
    text = str(error)
    if "OutOfMemoryError" in names or "out of memory" in text.lower():
        return False
    if "AcceleratorError" in names:
        return True
    return isinstance(error, RuntimeError) and any(mark in text for mark in MARKS)
