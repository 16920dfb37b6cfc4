"""Makes Triton's interpreter work out each type once instead of in each operation.

In kernels of small tensors, it spends more time on types than on values: each operation builds the
type and the shape of its result anew. Here equal ones share what follows from them. Values, and
the checks of types and shapes, remain Triton's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core: Any = tl.core
_block_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}  # sizes |-> shape and numel of a type
_tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # sizes |-> the same, of a tensor
_numpy_types: dict[str, np.dtype[Any]] = {}  # by the name of a type
_init_new_block: Callable[..., None] = core.block_type.__init__
_init_new_tensor: Callable[..., None] = core.tensor.__init__
_compare: Callable[[Any, Any], bool] = core.dtype.__eq__
_find_numpy_type: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value


@contextmanager
def remembered_types() -> Iterator[None]:
    """Remember types for the time of a test."""
    builder: Any = interpreter.interpreter_builder
    replaced: list[tuple[Any, str, Any]] = [
        (core.block_type, "__init__", _init_block),
        (core.tensor, "__init__", _init_tensor),
        (core.dtype, "__eq__", _are_equal),
        (interpreter, "_get_np_dtype", _numpy_type),
        (TritonSemantic, "broadcast_impl_value", _broadcast_if_needed),
    ]
    if not builder.options.debug:
        # Only then would anyone look at whether integers overflow; it is computed all the same.
        options = replace(builder.options, sanitize_overflow=False)
        replaced.append((builder, "options", options))
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    sizes = tuple([each.value if type(each) is core.constexpr else each for each in shape])
    known = _block_shapes.get(sizes)
    if known is None:
        _init_new_block(self, element_ty, shape)  # with its checks
        _block_shapes[sizes] = self.shape, self.numel
    else:
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{sizes}, {element_ty}>"


def _init_tensor(self: Any, handle: Any, ty: Any) -> None:
    sizes = tuple(ty.shape) if ty.is_block() else ()
    known = _tensor_shapes.get(sizes)
    if known is None:
        _init_new_tensor(self, handle, ty)
        _tensor_shapes[sizes] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, ty, ty.scalar
        self.shape, self.numel = known


def _are_equal(self: Any, other: Any) -> bool:
    return self is other or _compare(self, other)


def _numpy_type(ty: Any) -> np.dtype[Any]:
    found = _numpy_types.get(ty.name)
    if found is None:
        found = _numpy_types[ty.name] = _find_numpy_type(ty)
    return found


def _broadcast_if_needed(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.shape is other.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)
