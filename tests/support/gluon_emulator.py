"""Runs Gluon kernels for Hopper on the CPU, as inconveniently as the hardware may.

Triton's interpreter does not know Gluon. Here a kernel's Python source runs in a language of its
own, just large enough for products of specialized warps. Partitions are threads of which one runs
at a time, in an order drawn from a seed; programs run one after the other, in such an order, too.
What the hardware does in its own time happens as early or as late as it may: the target of a copy
to shared memory is NaN until the copy arrives, a copy to global memory reads its source when it is
waited for or before, and a product reads its operands when it is issued, or not before it is waited
for. So a kernel that forgets a wait computes NaN or stale numbers, and one that waits for what
never comes raises DeadlockError.

Layouts, registers and swizzles do not exist here: the compiler answers for those (sm90.py).
"""

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
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
        for program in draw.sample(range(grid[0]), grid[0]):
            _Program(program, grid[0], draw).run(self, args, given)
        return None

    with patched(run=run, call=JITFunction.__call__):
        yield


def edited(jit: GluonJITFunction, old: str, new: str) -> GluonJITFunction:
    """Return a kernel's function with a piece of its source replaced."""
    source = inspect.getsource(jit.fn).removeprefix("@gluon.jit\n")
    assert source.count(old) == 1, old
    scope: dict[str, Callable[..., None]] = {}
    exec(source.replace(old, new), jit.fn.__globals__, scope)
    twin = copy(jit)
    twin.fn = scope[jit.fn.__name__]
    return twin


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
    copies: list[Callable[[], None]] = field(default_factory=list)  # by its threads
    unfenced: set[int] = field(default_factory=set)  # shared memory that it wrote, by address
    has_met: bool = True  # all of its threads have, since its last store to global memory
    is_blocked: Callable[[], bool] = lambda: False
    is_done: bool = False


@dataclass(eq=False)
class _Shared:
    """A view of shared memory."""

    data: Tensor
    program: "_Program"
    layout: object = None

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

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> "_Parts":
        assert dtype == self.dtype
        return _Parts(self, shape)

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape
        assert value.dtype == self.data.dtype
        self.data.copy_(value)
        self.program.now.unfenced.add(self.data.data_ptr())


@dataclass(eq=False)
class _Parts:
    """Tiles of shared memory as they lie there: column blocks, each cut into groups of rows."""

    tiles: _Shared  # [tiles, rows, columns]
    shape: list[int]  # [parts, rows of a part, columns of a part]

    def index(self, index: int) -> _Shared:
        num_tiles, num_rows, num_columns = self.tiles.shape
        _, rows, columns = self.shape
        per_block, per_tile = num_rows // rows, num_rows // rows * (num_columns // columns)
        assert num_tiles * per_tile == self.shape[0]
        assert 0 <= index < self.shape[0]
        block, part = divmod(index % per_tile, per_block)
        tile = self.tiles.data[index // per_tile]
        part_of_tile = tile.narrow(0, part * rows, rows).narrow(1, block * columns, columns)
        return _Shared(part_of_tile, self.tiles.program)


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
    base: Tensor  # flat
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
        self._functions: dict[JITFunction, Callable[..., Any]] = {}
        self._turn = threading.Condition()
        self._error: BaseException | None = None
        self._turns = [0, 0]  # of two warpgroups, passed and not taken

    def run(self, kernel: GluonJITFunction, args: tuple[Any, ...], options: Names) -> None:
        """Run it to its end."""
        inside = [
            _Matrix(each)
            if hasattr(each, "block_shape")
            else _Pointer(each.view(-1))
            if isinstance(each, Tensor)
            else each
            for each in args
        ]
        self._function(kernel)(*inside, **options)
        if self._loads or any(each.stores or each.products for each in self._partitions):
            raise HazardError("the program ends before what it has under way")

    def _function(self, jit: JITFunction) -> Callable[..., Any]:
        """Return a kernel's source as a function in the language of the emulation."""
        # Those written in assembly
        if jit is warpgroups.narrow:
            return Tensor.to
        if jit is warpgroups.wait_for_turn:
            return self._wait_for_hardware_turn
        if jit is warpgroups.pass_turn:
            return self._pass_hardware_turn
        if jit not in self._functions:
            names = dict(jit.fn.__globals__)
            self._functions[jit] = FunctionType(jit.fn.__code__, names)
            for name, value in names.items():
                if isinstance(value, JITFunction):
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
            int1=torch.bool,
            static_range=range,
            program_id=lambda axis: self._program,
            num_programs=lambda axis: self._num_programs,
            minimum=lambda a, b: _either(torch.minimum, min, a, b),
            maximum=lambda a, b: _either(torch.maximum, max, a, b),
            where=_where,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros_like=torch.zeros_like,
            arange=lambda start, end, layout: torch.arange(start, end),
            exp=torch.exp,
            exp2=torch.exp2,
            log2=torch.log2,
            fma=_fused,
            max=torch.amax,
            sum=torch.sum,
            expand_dims=torch.unsqueeze,
            reshape=torch.reshape,
            permute=torch.permute,
            split=lambda value: value.unbind(-1),
            convert_layout=lambda value, layout, assert_trivial=False: value,
            load=_load,
            store=self._store,
            atomic_add=self._atomic_add,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
            NVMMADistributedLayout=lambda *parts: None,
            NVMMASharedLayout=lambda *parts: None,
            DotOperandLayout=lambda *parts: None,
            BlockedLayout=lambda *parts: None,
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
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=self._copy_by_threads,
            commit_group=lambda: None,
            wait_group=self._wait_for_copies,
        )
        return {
            "gl": gl,
            "tl": gl,
            "mbarrier": mbarrier,
            "tma": tma,
            "async_copy": async_copy,
            "barrier": lambda: setattr(self.now, "has_met", True),
            "fence_async_shared": lambda: self.now.unfenced.clear(),
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

    def _wait_for_hardware_turn(self, warpgroup: int) -> None:
        mine = self.now
        mine.is_blocked = lambda: not self._turns[warpgroup]
        self._pass_turn()
        self._wait_for_turn(mine)
        mine.is_blocked = lambda: False
        self._turns[warpgroup] -= 1

    def _pass_hardware_turn(self, warpgroup: int) -> None:
        if self._turns[1 - warpgroup]:
            raise HazardError("a turn is passed twice: the barrier would end without its waiter")
        self._turns[1 - warpgroup] += 1

    # Global memory

    def _store(self, pointer: _Pointer, value: Any, mask: Tensor | None = None) -> None:
        if isinstance(pointer.offsets, int):
            pointer.base[pointer.offsets] = value
        else:
            inside = torch.broadcast_to(torch.tensor(True) if mask is None else mask, value.shape)
            offsets = torch.broadcast_to(pointer.offsets, value.shape)
            pointer.base[offsets[inside]] = value[inside]
        self.now.has_met = False

    def _atomic_add(self, pointer: _Pointer, value: int, *, sem: str, scope: str) -> int:
        assert (sem, scope) == ("acq_rel", "gpu")
        if not self.now.has_met:
            raise HazardError("one thread releases what others stored, and did not wait for them")
        before = int(pointer.base[pointer.offsets])
        pointer.base[pointer.offsets] = before + value
        return before

    # Copies

    def _copy_by_threads(self, target: _Shared, source: _Pointer, mask: Tensor) -> None:
        target.data[mask] = NAN

        def arrive() -> None:
            target.data[mask] = source.base[source.offsets[mask]]
            self.now.unfenced.add(target.data.data_ptr())

        self.now.copies.append(arrive)

    def _wait_for_copies(self, pendings: int) -> None:
        while len(self.now.copies) > pendings:
            self.now.copies.pop(0)()

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
        if source.data.data_ptr() in self.now.unfenced:
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

    def _multiply(
        self,
        first: _Shared | Tensor,
        second: _Shared,
        acc: Tensor,
        *,
        use_acc: bool = True,
        is_async: bool,
    ) -> Tensor:
        assert is_async
        if not use_acc:
            acc = torch.full_like(acc, NAN)
        is_early = self._draw.random() < 0.3
        operands = []
        for each in (first, second):
            is_shared = isinstance(each, _Shared)
            if is_shared and each.data.data_ptr() in self.now.unfenced:
                raise HazardError("no fence between a store to shared memory and a product")
            data = each.data if is_shared else each
            operands.append(data.float().clone() if is_early else data)

        def work() -> None:
            if not use_acc:
                acc.zero_()
            _add_product(acc, *operands)

        self.now.products.append(work)
        return acc

    def _wait_for_products(
        self, num_outstanding: int, deps: list[Tensor]
    ) -> Tensor | tuple[Tensor, ...]:
        while len(self.now.products) > num_outstanding:
            self.now.products.pop(0)()
        return deps[0] if len(deps) == 1 else tuple(deps)


def _either(of_tensors: Any, of_numbers: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return of_tensors(torch.as_tensor(a), torch.as_tensor(b))
    return of_numbers(a, b)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)
    return yes if condition else no


def _fused(a: Tensor, b: Any, c: Any) -> Tensor:
    """Return a * b + c, rounded once: a product of two float32 is exact in float64."""
    b, c = (each.double() if isinstance(each, Tensor) else each for each in (b, c))
    return (a.double() * b + c).float()


def _load(
    pointer: _Pointer, mask: Tensor | None = None, other: float = NAN, cache_modifier: str = ""
) -> Any:
    if isinstance(pointer.offsets, int):
        return pointer.base[pointer.offsets].item()
    if mask is None:
        return pointer.base[pointer.offsets]
    inside = torch.where(mask, pointer.offsets, 0)
    return torch.where(mask, pointer.base[inside], other)


def _add_product(acc: Tensor, first: Tensor, second: Tensor) -> None:
    """Add to it, 16 products at a time in ascending order, each element alike wherever it lies."""
    a, b = first.float().numpy(), second.float().numpy()
    for start in range(0, a.shape[1], 16):
        inner = slice(start, start + 16)
        product = np.einsum("mk,kn->mn", a[:, inner], b[inner], optimize=False)
        acc += torch.from_numpy(product)
