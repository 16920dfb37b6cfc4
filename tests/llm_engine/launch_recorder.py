"""Stands for CUDA graphs where there is no GPU."""

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction


class LaunchRecorder:
    """Stands for a CUDA graph: a repetition must make the launches that were recorded.

    Same kernels, same arguments; of tensors the same addresses, unless the step made them. Nothing
    is launched while it is recorded.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self.num_recorded = 0
        self.num_repeated = 0
        self.is_recording = False
        self._launches: list[tuple[object, ...]] | None = None
        self._known = known  # kept, so that no address is given out again
        self._addresses: set[int] = set()

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
        self._known += unseen_tensors()
        self._addresses = {each.untyped_storage().data_ptr() for each in self._known}
        self._launches = launches = []
        result = work()
        self._launches = None
        return launches, result

    def _described(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        is_outside = value.untyped_storage().data_ptr() in self._addresses
        address = value.data_ptr() if is_outside else None
        return value.dtype, value.shape, value.stride(), address


def unseen_tensors() -> list[Tensor]:
    """Return the tensors that exist, but for those of earlier calls."""
    found = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    gc.freeze()  # the next call need not look at hundreds of thousands of objects again
    return found
