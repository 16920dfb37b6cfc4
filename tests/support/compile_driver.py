"""Stands for a GPU driver where kernels are only compiled: launches with `warmup=True`."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_numbers = itertools.count(1000)  # no GPU has one of these


class CompileDriver:
    """A device of its own, for which no kernel has been compiled."""

    def __init__(self) -> None:
        self._number = next(_numbers)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def compile_driver() -> Iterator[None]:
    """Compile for Hopper what is launched, also on CPU tensors."""
    with patch.object(driver, "_active", CompileDriver()):
        yield
