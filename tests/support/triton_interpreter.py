"""Runs Triton kernels on the CPU for the time of a test, in a process that may also compile them.

TRITON_INTERPRET=1 would have to be set before the first import of Triton and would hold for the
whole process; here only the launches inside the context are interpreted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from attn_kernels.sampling.bodies_gumbel import mix
from tests.support.interpreter_types import remembered_types


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret kernels, their helpers and Triton's own library functions."""
    made: dict[Callable[..., Any], InterpretedFunction] = {}  # by the Python function

    def twin(jit_function: JITFunction) -> InterpretedFunction:
        if jit_function.fn not in made:
            made[jit_function.fn] = InterpretedFunction(jit_function.fn)
        return made[jit_function.fn]

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return twin(self).run(*args, grid=grid, warmup=warmup, **options)

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        # Without patching the language, as the interpreter does for each call and never undoes.
        return twin(self).rewrite()(*args, **kwargs)

    builder: Any = InterpreterBuilder
    names = ("create_dot", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc")
    saved = {name: getattr(builder, name) for name in names}
    try:
        for name, replacement in zip(names, (_dot, _fp_to_fp, _fp_ext, _fp_trunc), strict=True):
            setattr(builder, name, replacement)
        # Overflow to infinity is as normal in a kernel as on a device.
        with (
            patched(run=run, call=call),
            remembered_types(),
            patched_language(),
            np.errstate(all="ignore"),
        ):
            yield
    finally:
        for name, known in saved.items():
            setattr(builder, name, known)


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


@contextmanager
def patched_language() -> Iterator[None]:
    """Interpret Triton's language throughout, where the interpreter patches it for each launch."""
    # A library function and a kernel: each names a module that the other does not.
    scopes = [interpreter._patch_lang(fn) for fn in (tl.max.fn, mix.fn)]
    try:
        with patch.object(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope()):
            yield
    finally:
        for scope in reversed(scopes):
            scope.restore()


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


def _fp_ext(self: Any, source: Any, target: Any) -> TensorHandle:
    """Widen bfloat16 at once; the interpreter's own conversion takes its numbers apart."""
    if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
        return TensorHandle(_widened(source), tl.float32)
    return self.cast_impl(source, target)


def _fp_trunc(self: Any, source: Any, target: Any) -> TensorHandle:
    """Round to bfloat16, where the interpreter's own conversion cuts."""
    if target.scalar != tl.bfloat16:
        return self.cast_impl(source, target)
    return _fp_to_fp(self, source, target, None)


def _fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> TensorHandle:
    """Convert as a device does.

    The interpreter's own conversion takes the NaN of e4m3 for 480, and loses the carry of a
    mantissa that rounds up.
    """
    wanted = target.scalar
    if source.dtype.scalar == tl.float8e4nv:
        wide = torch.from_numpy(source.data.copy()).view(torch.float8_e4m3fn).float()
    else:
        wide = torch.from_numpy(np.array(_widened(source)))
    if wanted == tl.float8e4nv:
        data = wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    elif wanted == tl.bfloat16:
        data = wide.to(torch.bfloat16).view(torch.uint16)
    else:
        data = wide.to({tl.float16: torch.float16, tl.float32: torch.float32}[wanted])
    return TensorHandle(data.numpy(), wanted)
