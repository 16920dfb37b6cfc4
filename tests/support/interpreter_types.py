"""Makes Triton's interpreter work out each type once instead of in each operation.

In kernels of small tensors, it spends more time on types than on values: each operation builds the
type and the shape of its result again, and each number in a kernel becomes a tensor of the other
operand's type and shape. Here equal ones share what follows from them. Values, and the checks of
types and shapes, remain Triton's own.
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
# (name of the elements' type, sizes) |-> shape, numel and name of a type
_block_shapes: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
_block_types: dict[str, Any] = {}  # by name: tensors of equal types have the same
_common_types: dict[tuple[str, str], tuple[Any, Any]] = {}  # names of two |-> when broadcast
_tensor_shapes: dict[str, tuple[Any, Any]] = {}  # type's name, "" of scalars |-> shape and numel
_constants: dict[tuple[type, Any, str], Any] = {}  # (type, number, name of a type) |-> tensor
# (type of the other operand, type, number, what is allowed) |-> tensor
_numbers: dict[tuple[str, type, Any, tuple[bool, ...]], Any] = {}
_numpy_types: dict[str, np.dtype[Any]] = {}  # by the name of a type
_init_new_block: Callable[..., None] = core.block_type.__init__
_init_new_tensor: Callable[..., None] = core.tensor.__init__
_compare: Callable[[Any, Any], bool] = core.dtype.__eq__
_find_numpy_type: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_find_constant: Callable[..., Any] = TritonSemantic.scalar_constant
_match_operands: Callable[..., Any] = TritonSemantic.binary_op_type_checking_impl
_unwrap_any: Callable[[Any], Any] = core._unwrap_if_constexpr


@contextmanager
def remembered_types() -> Iterator[None]:
    """Remember types for the time of a test."""
    builder: Any = interpreter.interpreter_builder
    replaced: list[tuple[Any, str, Any]] = [
        (core.block_type, "__init__", _init_block),
        (core.block_type, "to_ir", _block_to_ir),
        (core.tensor, "__init__", _init_tensor),
        (core.dtype, "__eq__", _are_equal),
        (core, "_unwrap_if_constexpr", _unwrapped),
        (interpreter, "_get_np_dtype", _numpy_type),
        (interpreter, "_patch_attr", _patch_function),
        (TritonSemantic, "broadcast_impl_value", _broadcast_once),
        (TritonSemantic, "scalar_constant", _constant),
        (TritonSemantic, "binary_op_type_checking_impl", _matched_operands),
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
    known = _block_shapes.get((element_ty.name, sizes))
    if known is None:
        _init_new_block(self, element_ty, shape)  # with its checks
        _block_shapes[element_ty.name, sizes] = self.shape, self.numel, self.name
    else:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known


def _init_tensor(self: Any, handle: Any, ty: Any) -> None:
    name = ""
    if ty.is_block():
        name = ty.name
        ty = _block_types.setdefault(name, ty)
    known = _tensor_shapes.get(name)
    if known is None:
        _init_new_tensor(self, handle, ty)
        _tensor_shapes[name] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, ty, ty.scalar
        self.shape, self.numel = known


def _are_equal(self: Any, other: Any) -> bool:
    if type(other) is core.dtype:
        return bool(self.name == other.name)
    return self is other or _compare(self, other)


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    if kind is core.tensor or kind is int or value is None:
        return value
    return _unwrap_any(value)


def _block_to_ir(self: Any, builder: Any) -> Any:
    self.element_ty.to_ir(builder)  # with its checks
    return self


def _numpy_type(ty: Any) -> np.dtype[Any]:
    found = _numpy_types.get(ty.name)
    if found is None:
        found = _numpy_types[ty.name] = _find_numpy_type(ty)
    return found


def _broadcast_once(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
    one, other = lhs.type, rhs.type
    if one is other:
        return lhs, rhs
    key = one.name, other.name
    known = _common_types.get(key)
    if known is None:
        lhs, rhs = _broadcast(self, lhs, rhs)  # with its checks
        _common_types[key] = lhs.type, rhs.type
        return lhs, rhs
    return _spread(self, lhs, known[0]), _spread(self, rhs, known[1])


def _spread(self: TritonSemantic, tensor: Any, ty: Any) -> Any:
    if tensor.type is ty or not ty.is_block():
        return tensor
    if tensor.type.is_block():
        handle = self.builder.create_broadcast(tensor.handle, ty.shape)
    else:
        handle = self.builder.create_splat(ty, tensor.handle)
    return core.tensor(handle, ty)


def _constant(self: TritonSemantic, value: Any, dtype: Any) -> Any:
    key = type(value), value, dtype.name
    found = _constants.get(key)
    if found is None:
        found = _constants[key] = _find_constant(self, value, dtype)
    return found


def _matched_operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    if not isinstance(lhs, core.tensor):
        return _match_operands(self, lhs, rhs, *options)
    if isinstance(rhs, core.tensor):
        one, other = lhs.dtype, rhs.dtype
        if one.is_ptr():
            needs_no_cast = allow_lhs_ptr and other.is_int()
        else:  # numbers of one type keep it, but in some divisions
            needs_no_cast = one.name == other.name and not div_or_mod
        if needs_no_cast:
            return _broadcast_once(self, lhs, rhs)
        return _match_operands(self, lhs, rhs, *options)
    if lhs.dtype.is_ptr():
        return _match_operands(self, lhs, rhs, *options)
    key = lhs.type.name, type(rhs), rhs, options
    known = _numbers.get(key)
    if known is not None:
        return lhs, known
    same, tensor = _match_operands(self, lhs, rhs, *options)
    if same is lhs:  # else it is of another type now
        _numbers[key] = tensor
    return same, tensor


def _patch_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Give a function of the language the interpreter's semantic, without a copy of its options."""
    semantic = interpreter.interpreter_semantic
    if core.is_builtin(member):  # mostly a check that the semantic is given
        member = getattr(member, "__wrapped__", member)

    def patched(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*args, **options)

    scope.set_attr(owner, name, patched)
