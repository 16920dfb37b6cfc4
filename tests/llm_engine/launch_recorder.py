"""Stands for CUDA graphs where there is no GPU."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton.runtime.jit import JITFunction


class LaunchRecorder:
    """Stands for a CUDA graph: a repetition must make the launches that were recorded.

    Same kernels, same arguments; of tensors the same addresses, unless the step made them. Nothing
    is launched while it is recorded.
    """

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_repeated = 0
        self.is_recording = False
        self._launches: list[tuple[object, ...]] | None = None
        self._made: set[int] = set()
        self._others: dict[int, Tensor] = {}  # kept, so that no address is given out again

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.num_recorded += 1
        self.is_recording = True
        recorded, _ = self._run(work)
        self.is_recording = False
        assert recorded

        def repeat() -> Any:
            self.num_repeated += 1
            launches, result = self._run(work)
            assert launches == recorded, "a launch differs from the recorded one"
            return result

        return repeat

    def note(self, kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._launches is not None:
            values = [self._described(each) for each in (*args, *options.values())]
            self._launches.append((kernel.__name__, tuple(options), *values))

    def _run(self, work: Callable[[], Any]) -> tuple[list[tuple[object, ...]], Any]:
        self._launches = launches = []
        with NewStorages() as new:
            self._made = new.addresses
            result = work()
        self._launches = None
        return launches, result

    def _described(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        address = None
        if storage_of(value) not in self._made:
            address = value.data_ptr()
            self._others.setdefault(storage_of(value), value)
        return value.dtype, value.shape, value.stride(), address


class NewStorages(TorchDispatchMode):
    """Notes the memory that operations allocate for their results."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.addresses |= storages_in(result) - storages_in((args, kwargs))
        return result


def storages_in(values: Any) -> set[int]:
    return {storage_of(each) for each in tree_iter(values) if isinstance(each, Tensor)}


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
