"""Runs Triton kernels on the CPU for the time of a test, in a process that may also compile them.

TRITON_INTERPRET=1 would have to be set before the first import of Triton and would hold for the
whole process; here only the launches inside the context are interpreted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret kernels, their helpers and Triton's own library functions."""
    made: dict[Callable[..., Any], InterpretedFunction] = {}  # by the Python function

    def twin(jit_function: JITFunction) -> InterpretedFunction:
        if jit_function.fn not in made:
            made[jit_function.fn] = InterpretedFunction(jit_function.fn)
        return made[jit_function.fn]

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Any library function: it names the module that kernels themselves do not.
        library = interpreter._patch_lang(tl.max.fn)
        try:
            return twin(self).run(*args, grid=grid, warmup=warmup, **options)
        finally:
            library.restore()

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        # The launch has patched the language. Patching it again, as the interpreter does for each
        # call, is slow and is never undone: later compilations in the process would fail.
        return twin(self).rewrite()(*args, **kwargs)

    builder: Any = InterpreterBuilder
    saved = builder.create_dot
    try:
        builder.create_dot = _dot
        # Overflow to infinity is as normal in a kernel as on a device.
        with patched(run=run, call=call), np.errstate(all="ignore"):
            yield
    finally:
        builder.create_dot = saved


@contextmanager
def patched(*, run: Callable[..., Any], call: Callable[..., Any]) -> Iterator[None]:
    """Replace what a launch and a call inside a kernel do, and let launchers accept CPU tensors."""
    jit_function: Any = JITFunction
    saved = jit_function.run, jit_function.__call__, triton.knobs.runtime.interpret
    try:
        jit_function.run, jit_function.__call__ = run, call
        triton.knobs.runtime.interpret = True
        yield
    finally:
        jit_function.run, jit_function.__call__, triton.knobs.runtime.interpret = saved


def _dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
    """Multiply matrices as a device does: bfloat16 by value, each row alike wherever it lies.

    The interpreter's own product multiplies bfloat16 bit patterns as integers, and its BLAS sums
    in an order that depends on the row.
    """
    product = np.einsum("mk,kn->mn", _widened(a), _widened(b), optimize=False)
    return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar == tl.bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)
