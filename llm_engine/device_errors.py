"""Tells errors that make a device unusable from those of a single pass."""

# Beginnings of the plain RuntimeErrors of torch, cuBLAS and Triton.
MARKS = ("CUDA error", "Triton Error [CUDA]", "HIP error")


def is_device_lost(error: BaseException) -> bool:
    """Return whether an error leaves the device unusable for the rest of the process.

    After an illegal address, a device-side assert or a hardware fault each later call returns the
    same error, and only a new process gets a working context. Lack of memory is not such an error,
    nor is work that cannot be recorded as a CUDA graph. torch raises AcceleratorError; the type is
    not imported, because this also runs without torch.

    Source: the descriptions of cudaError_t in the CUDA runtime's reference.
    """
    if is_out_of_memory(error) or _is_of_recording(error):
        return False
    if "AcceleratorError" in _type_names(error):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that torch or the driver found too little memory."""
    return "OutOfMemoryError" in _type_names(error) or "out of memory" in str(error).lower()


def _is_of_recording(error: BaseException) -> bool:
    # CUDA's texts of all its errors of recordings, and no others, speak of capturing. More lines
    # may follow, such as the names of C++ functions.
    return "captur" in str(error).partition("\n")[0]


def _type_names(error: BaseException) -> set[str]:
    return {each.__name__ for each in type(error).__mro__}
