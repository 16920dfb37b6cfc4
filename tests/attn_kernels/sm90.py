"""Compiles what launchers launch for sm_90, on any host: no GPU, no driver."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from attn_kernels import chain
from tests.support.triton_interpreter import patched

GLOBAL_ACCESS = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?!param|shared)|cp\.async|cp\.reduce)")
TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    ptx: str
    shared_bytes: int
    registers: int
    spill_bytes: int


_compiled: dict[tuple[object, ...], Compiled] = {}  # by source and options


def launches_of(action: Callable[[], object]) -> list[Launch]:
    """Return what an action would launch; nothing runs."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel=self, args=args, options=options))

    may_chain = patch.object(chain, "may_chain", lambda _: True)
    with patched(run=run, call=JITFunction.__call__), may_chain:
        action()
    return launches


def compile_launch(launch: Launch) -> Compiled:
    """Compile one launch with the specialization that Triton would give it."""
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.args, strict=False))
    values.update({name: launch.options[name] for name in names if name in launch.options})
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[object]]] = {}
    for index, name in enumerate(names):
        value = values[name]
        parameter = launch.kernel.params[index]
        is_specialized = not parameter.do_not_specialize
        is_one = is_specialized and type(value) is int and value == 1
        if parameter.is_constexpr or value is None or is_one:
            signature[name] = "constexpr"
            constexprs[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if is_specialized and value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source_of = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    source = source_of(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {name: value for name, value in launch.options.items() if name not in names}
    key = (source.hash(), *sorted(options.items()))
    if key not in _compiled:  # launchers choose the same for many a shape
        _compiled[key] = _compile(source, options)
        if launch.options.get("IS_CHAINED"):
            assert waits_first(_compiled[key].ptx)
    return _compiled[key]


def waits_first(ptx: str) -> bool:
    """Return whether a chained kernel waits before it reads or writes memory of the device."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return bool(wait) and not GLOBAL_ACCESS.search(before)


def ptxas_notes(ptx: str) -> str:
    """Return what ptxas has to say about code that compiles, such as what it had to make slow."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path)]
        command += ["-o", str(path.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _compile(source: ASTSource, options: dict[str, Any]) -> Compiled:
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # compile, whatever the user's cache holds
        compiled = triton.compile(source, target=TARGET, options=options)
        registers, spill_bytes = _resources(compiled.asm["cubin"])
        return Compiled(
            ptx=compiled.asm["ptx"],
            shared_bytes=compiled.metadata.shared,
            registers=registers,
            spill_bytes=spill_bytes,
        )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of local memory, as cuobjdump reads them."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [cuobjdump, "--dump-resource-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2])
