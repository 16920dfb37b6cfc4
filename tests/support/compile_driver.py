"""Stands for a GPU driver where kernels are only compiled: launches with `warmup=True`."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_numbers = itertools.count(1000)  # no GPU has one of these


class CompileDriver:
    """A device of its own, for which no kernel has been compiled."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self.launched: list[str] = []  # names of kernels for which a launcher was made

    def launcher_cls(self, source: Any, metadata: object) -> None:
        self.launched.append(source.name)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def compile_driver() -> Iterator[CompileDriver]:
    """Compile for Hopper what is launched, also on CPU tensors."""
    with patch.object(driver, "_active", CompileDriver()) as active:
        yield active
