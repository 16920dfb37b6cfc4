"""Runs Gluon kernels for Hopper on the CPU, as inconveniently as the hardware may.

Triton's interpreter does not know Gluon. Here a kernel's Python source runs in a language of its
own, just large enough for products of specialized warps. Partitions are threads of which one runs
at a time, in an order drawn from a seed. What the hardware does in its own time happens as early or
as late as it may: the target of a copy to shared memory is NaN until the copy arrives, a copy to
global memory reads its source when it is waited for or before, and a product reads its operands
when it is issued, or not before it is waited for. So a kernel that forgets a wait computes NaN or
stale numbers, and one that waits for what never comes raises DeadlockError.

Layouts, registers and swizzles do not exist here: the compiler answers for those (sm90.py).
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon import language
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from attn_kernels import warpgroups
from tests.support.triton_interpreter import patched

NAN = float("nan")
Names = dict[str, Any]


class DeadlockError(Exception):
    """All partitions wait, and nothing is under way."""


class HazardError(Exception):
    """What a kernel does is wrong on some hardware, whatever it computed here."""


@contextmanager
def emulated(seed: int) -> Iterator[None]:
    """Emulate launches of Gluon kernels; the seed decides what is up to the hardware."""
    draw = random.Random(seed)
    run_otherwise = JITFunction.run  # the interpreter, say

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not isinstance(self, GluonJITFunction):
            return run_otherwise(self, *args, grid=grid, warmup=warmup, **options)
        given = {name: options[name] for name in self.arg_names if name in options}
        for program in range(grid[0]):
            _Program(program, grid[0], draw).run(self, args, given)
        return None

    with patched(run=run, call=JITFunction.__call__):
        yield


@dataclass(eq=False)
class _Barrier:
    """A phase ends when as many have arrived as count, and all expected bytes have."""

    count: int = 0
    arrivals: int = 0
    pending_bytes: int = 0
    phase: int = 0

    def update(self, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        self.arrivals += arrivals
        self.pending_bytes += num_bytes
        if self.arrivals > self.count:
            raise HazardError("more arrive at a barrier than it counts")
        if self.arrivals == self.count and self.pending_bytes == 0:
            self.arrivals = 0
            self.phase += 1


@dataclass(eq=False)
class _Partition:
    products: list[Callable[[], None]] = field(default_factory=list)  # under way
    stores: list[Callable[[], None]] = field(default_factory=list)
    has_fenced: bool = True  # since its last store to shared memory
    is_blocked: Callable[[], bool] = lambda: False
    is_done: bool = False


@dataclass(eq=False)
class _Shared:
    """A view of shared memory."""

    data: Tensor
    program: "_Program"

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, index: int) -> "_Shared":
        assert 0 <= index < len(self.data)
        return _Shared(self.data[index], self.program)

    def permute(self, order: tuple[int, ...]) -> "_Shared":
        return _Shared(self.data.permute(order), self.program)

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        assert value.dtype == self.data.dtype
        self.data.copy_(value)
        self.program.now.has_fenced = False


class _Matrix:
    """A tensor descriptor, as a kernel sees it."""

    def __init__(self, descriptor: Any) -> None:
        self.base: Tensor = descriptor.base
        self.dtype = self.base.dtype
        self.layout = descriptor.layout
        self.block_type = SimpleNamespace(shape=list(descriptor.block_shape))

    def box(self, start: list[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """Return what of the matrix a box covers, and where in the box that lies."""
        part = self.base
        for dim, (first, size) in enumerate(zip(start, self.block_type.shape, strict=True)):
            length = min(size, self.base.shape[dim] - first)
            part = part.narrow(dim, min(first, self.base.shape[dim]), max(length, 0))
        return part, tuple(slice(0, length) for length in part.shape)


@dataclass(frozen=True)
class _Pointer:
    base: Tensor
    offsets: Tensor | int = 0

    def __add__(self, offsets: Tensor | int) -> "_Pointer":
        return _Pointer(self.base, self.offsets + offsets)


class _Program:
    """One program of a launch."""

    def __init__(self, program: int, num_programs: int, draw: random.Random) -> None:
        self._program, self._num_programs, self._draw = program, num_programs, draw
        self.now = _Partition()
        self._partitions = [self.now]
        self._loads: list[Callable[[], None]] = []
        self._functions: dict[GluonJITFunction, Callable[..., Any]] = {}
        self._turn = threading.Condition()
        self._error: BaseException | None = None

    def run(self, kernel: GluonJITFunction, args: tuple[Any, ...], options: Names) -> None:
        """Run it to its end."""
        inside = [
            _Matrix(each)
            if hasattr(each, "block_shape")
            else _Pointer(each)
            if isinstance(each, Tensor)
            else each
            for each in args
        ]
        self._function(kernel)(*inside, **options)
        if self._loads or any(each.stores or each.products for each in self._partitions):
            raise HazardError("the program ends before what it has under way")

    def _function(self, jit: GluonJITFunction) -> Callable[..., Any]:
        """Return a kernel's source as a function in the language of the emulation."""
        if jit is warpgroups.narrow:
            return Tensor.to
        if jit not in self._functions:
            names = dict(jit.fn.__globals__)
            self._functions[jit] = FunctionType(jit.fn.__code__, names)
            for name, value in names.items():
                if isinstance(value, GluonJITFunction):
                    names[name] = self._function(value)
                elif isinstance(value, language.constexpr):
                    names[name] = value.value
            names.update(self._language())
        return self._functions[jit]

    def _language(self) -> Names:
        gl = SimpleNamespace(
            constexpr=None,
            float32=torch.float32,
            int64=torch.int64,
            static_range=range,
            program_id=lambda axis: self._program,
            num_programs=lambda axis: self._num_programs,
            minimum=min,
            maximum=max,
            where=lambda condition, yes, no: yes if condition else no,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            arange=lambda start, end, layout: torch.arange(start, end),
            exp=torch.exp,
            expand_dims=torch.unsqueeze,
            reshape=torch.reshape,
            permute=torch.permute,
            split=lambda value: value.unbind(-1),
            convert_layout=lambda value, layout, assert_trivial: value,
            load=_load,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
            NVMMADistributedLayout=lambda *parts: None,
            SliceLayout=lambda *parts: None,
        )
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=self._init,
            wait=self._wait,
            expect=lambda barrier, num_bytes: barrier.update(arrivals=1, num_bytes=num_bytes),
            arrive=lambda barrier, count, pred=True: barrier.update(arrivals=count * pred),
        )
        tma = SimpleNamespace(
            async_copy_global_to_shared=self._copy_in,
            async_copy_shared_to_global=self._copy_out,
            store_wait=self._wait_for_stores,
        )
        return {
            "gl": gl,
            "mbarrier": mbarrier,
            "tma": tma,
            "fence_async_shared": lambda: setattr(self.now, "has_fenced", True),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
        }

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype == torch.int64:
            barriers = [_Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=barriers.__getitem__, shape=shape)
        return _Shared(torch.full(shape, NAN, dtype=dtype), self)

    # Partitions

    def _specialize(
        self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *_resources: object
    ) -> None:
        self._partitions = [_Partition() for _ in parts]
        self.now = self._draw.choice(self._partitions)
        threads = [
            threading.Thread(target=self._run_partition, args=(mine, *part), daemon=True)
            for mine, part in zip(self._partitions, parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run_partition(
        self, mine: _Partition, function: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        try:
            self._wait_for_turn(mine)
            function(*args)
        except BaseException as error:
            self._error = self._error or error
        mine.is_done = True
        self._pass_turn()

    def _wait_for_turn(self, mine: _Partition) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self.now is mine)
        if self._error is not None:
            raise self._error  # of another partition: nobody would arrive where this one waits

    def _pass_turn(self) -> None:
        """Let some copies arrive, and then a partition go on that can."""
        others = [each for each in self._partitions if not each.is_done]
        ready: list[_Partition] = []
        while others and not ready and self._error is None:
            while self._loads and self._draw.random() < 0.4:
                self._loads.pop(self._draw.randrange(len(self._loads)))()
            ready = [each for each in others if not each.is_blocked()]
            if not ready and not self._loads:
                self._error = DeadlockError(f"{len(others)} partitions wait for ever")
        if others:
            with self._turn:
                self.now = self._draw.choice(ready or others)
                self._turn.notify_all()

    # Barriers

    def _init(self, barrier: _Barrier, count: int) -> None:
        barrier.count = count

    def _wait(self, barrier: _Barrier, phase: int) -> None:
        mine = self.now
        mine.is_blocked = lambda: barrier.phase & 1 == phase
        self._pass_turn()
        self._wait_for_turn(mine)
        mine.is_blocked = lambda: False

    # Copies

    def _copy_in(
        self, source: _Matrix, start: list[int], barrier: _Barrier, target: _Shared
    ) -> None:
        assert target.shape == source.block_type.shape
        target.data.fill_(NAN)

        def arrive() -> None:
            part, inside = source.box(start)
            target.data.zero_()
            target.data[inside] = part
            barrier.update(num_bytes=-target.data.nbytes)

        self._loads.append(arrive)

    def _copy_out(self, target: _Matrix, start: list[int], source: _Shared) -> None:
        assert source.shape == target.block_type.shape
        if not self.now.has_fenced:
            raise HazardError("no fence between a store to shared memory and a copy from there")

        def read() -> None:
            part, inside = target.box(start)
            part.copy_(source.data[inside])

        self.now.stores.append(read)

    def _wait_for_stores(self, pendings: int) -> None:
        stores = self.now.stores
        while len(stores) > pendings or (stores and self._draw.random() < 0.3):
            stores.pop(0)()

    # Products

    def _multiply(self, first: _Shared, second: _Shared, acc: Tensor, *, is_async: bool) -> Tensor:
        assert is_async
        is_early = self._draw.random() < 0.3
        operands = [
            each.data.float().clone() if is_early else each.data for each in (first, second)
        ]
        self.now.products.append(lambda: _add_product(acc, *operands))
        return acc

    def _wait_for_products(
        self, num_outstanding: int, deps: list[Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        while len(self.now.products) > num_outstanding:
            self.now.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def _load(pointer: _Pointer, mask: Tensor, other: float) -> Tensor:
    inside = torch.where(mask, pointer.offsets, 0)
    return torch.where(mask, pointer.base[inside], other)


def _add_product(acc: Tensor, first: Tensor, second: Tensor) -> None:
    """Add to it, 16 products at a time in ascending order, each element alike wherever it lies."""
    a, b = first.float().numpy(), second.float().numpy()
    for start in range(0, a.shape[1], 16):
        inner = slice(start, start + 16)
        product = np.einsum("mk,kn->mn", a[:, inner], b[inner], optimize=False)
        acc += torch.from_numpy(product)
