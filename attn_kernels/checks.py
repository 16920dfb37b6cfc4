"""Checks that need no synchronization; each raises an error of errors.py.

In a debug mode, debug_checks.py checks values that only the device knows.
"""

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from attn_kernels.errors import (
    DeviceError,
    DtypeError,
    KernelInputError,
    PageTableError,
    ScaleError,
    ShapeError,
    StrideError,
)
from attn_kernels.limits import group_refusal, head_dim_refusal

Integers = Sequence[int] | npt.NDArray[np.integer]

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
FP8_DTYPE = torch.float8_e4m3fn  # of pools only, with a scale for each head
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # bytes |-> integers
VECTOR_BYTES = 16  # that kernels read and write at once


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device | None,
    contiguous_from: int = 0,
) -> None:
    """Check one argument.

    Args:
        name: Name of the tensor in the message.
        tensor: The tensor.
        shape: The size of each dimension; None allows any.
        dtype: The allowed dtype or dtypes.
        device: The device of the launch; None for the tensor that determines it.
        contiguous_from: First dimension of the part that must be contiguous; earlier dimensions may
            have any stride.
    """
    # About twenty of these precede the launches of a layer, and the host is the bottleneck.
    if not isinstance(tensor, Tensor):
        raise DtypeError(f"{name} is of type {type(tensor).__name__}, must be a torch.Tensor")
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if tensor.dtype not in allowed:
        raise DtypeError(f"{name} is {tensor.dtype}, must be {' or '.join(map(str, allowed))}")
    if not _has_shape(tensor, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ShapeError(f"{name} has shape {list(tensor.shape)}, must be [{wanted}]")
    if device is not None and tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}, must be on {device}")
    if tensor.is_contiguous():
        return
    expected = 1
    for dim in reversed(range(contiguous_from, tensor.dim())):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            raise StrideError(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}, "
                f"must be contiguous from dimension {contiguous_from} on"
            )
        expected *= tensor.shape[dim]


def _has_shape(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    sizes = tensor.shape
    if len(sizes) != len(shape):
        return False
    for size, want in zip(sizes, shape, strict=True):
        if want is not None and want != size:
            return False
    return True


def check_aligned(name: str, tensor: Tensor) -> None:
    """Check that a tensor is aligned for vector access."""
    if tensor.data_ptr() % VECTOR_BYTES:
        raise StrideError(
            f"{name} begins at address {tensor.data_ptr()}, must be a multiple of {VECTOR_BYTES}"
        )


def check_launchable(name: str, tensor: Tensor) -> None:
    """Check that Triton can run on the tensor's device (the CPU only in the interpreter)."""
    if tensor.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise DeviceError(f"{name} is on {tensor.device}, must be on a CUDA device")


def check_own_memory(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two contiguous tensors of one device share no byte."""
    if -tensor.nbytes < tensor.data_ptr() - other.data_ptr() < other.nbytes:
        raise KernelInputError(f"{name} lies in the memory of {other_name}, must have its own")


def check_staging(staging: Tensor, pages: Tensor) -> None:
    """Check that staging is on the pool's device or in pinned host memory."""
    device = pages.device
    if staging.device == device:
        check_own_memory("staging", staging, "pages", pages)
        return
    is_on_host = staging.device.type == "cpu"
    if not (is_on_host and staging.is_pinned()):
        found = "in unpinned host memory" if is_on_host else f"on {staging.device}"
        raise DeviceError(f"staging is {found}, must be on {device} or in pinned host memory")


def check_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Check head counts; return the group size (query heads of one key-value head)."""
    check_int("num_qo_heads", num_qo_heads)
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ShapeError(
            f"num_qo_heads {num_qo_heads} must be a multiple of num_kv_heads {num_kv_heads}"
        )
    group = num_qo_heads // num_kv_heads
    if allowed := group_refusal(group):
        raise ShapeError(f"{group} query heads per key-value head, must be {allowed}")
    if allowed := head_dim_refusal(head_dim):
        raise ShapeError(f"head_dim is {head_dim}, must be {allowed}")
    return group


def check_pages(pages: Tensor) -> None:
    """Check a pool [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]."""
    check_tensor(
        "pages",
        pages,
        shape=(None, None, 2, None, None, None),
        dtype=(*FLOAT_DTYPES, FP8_DTYPE),
        device=None,
    )
    if pages.numel() == 0:
        raise ShapeError(f"pages has shape {list(pages.shape)}, must have no dimension of size 0")
    check_launchable("pages", pages)
    check_aligned("pages", pages)


def query_dtypes(pages: Tensor) -> tuple[torch.dtype, ...]:
    """Return the allowed dtypes of queries over a pool: its own, or half precision over fp8."""
    return HALF_DTYPES if pages.dtype == FP8_DTYPE else (pages.dtype,)


def check_kv_scales(pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Check that fp8 pools, and no others, have scales [num_layers, num_kv_heads], float32."""
    _, num_layers, _, num_kv_heads, _, _ = pages.shape
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if pages.dtype != FP8_DTYPE:
            if scale is not None:
                raise ScaleError(f"{name} is given, must be None for pages of {pages.dtype}")
            continue
        if scale is None:
            raise ScaleError(f"{name} is None, must be given for pages of {pages.dtype}")
        check_tensor(
            name,
            scale,
            shape=(num_layers, num_kv_heads),
            dtype=torch.float32,
            device=pages.device,
        )


def hopper_refusal(
    pages: Tensor, *, head_dims: Sequence[int], page_sizes: Sequence[int]
) -> str | None:
    """Return what a Hopper kernel does not support in a pool's shape, and what it supports."""
    page_size, head_dim = pages.shape[-2:]
    if head_dim not in head_dims:
        return f"head_dim {head_dim}, only {head_dims}"
    if page_size not in page_sizes:
        return f"page_size {page_size}, only {page_sizes}"
    num_rows = pages.numel() // head_dim
    if num_rows >= 2**31:  # they are numbered in 32 bits
        return f"a pool of {num_rows} rows, only fewer than 2**31"
    return None


def check_scores(scale: float, sliding_window: int | None, soft_cap: float | None) -> None:
    """Check the parameters of an attention kernel's scores."""
    check_number("scale", scale)
    if not math.isfinite(scale):
        raise ShapeError(f"scale is {scale}, must be finite")
    if sliding_window is not None:
        check_at_least_one("sliding_window", sliding_window, otherwise=" or None")
    if soft_cap is not None:
        check_number("soft_cap", soft_cap, otherwise=" or None")
        if not 0 < soft_cap < math.inf:
            raise ShapeError(f"soft_cap is {soft_cap}, must be positive and finite, or None")


def check_attention_inputs(
    q: Tensor, layer: int, kv_page_indices: Tensor, *, pages: Tensor, num_qo_heads: int
) -> None:
    """Check the inputs of a run of attention over a pool."""
    _, num_layers, _, _, _, head_dim = pages.shape
    shape = (None, num_qo_heads, head_dim)
    check_tensor("q", q, shape=shape, dtype=query_dtypes(pages), device=pages.device)
    check_layer(layer, num_layers)
    check_tensor(
        "kv_page_indices", kv_page_indices, shape=(None,), dtype=torch.int32, device=pages.device
    )


def check_attention_outputs(
    out: Tensor | None,
    lse: Tensor | None,
    q: Tensor,
    *,
    dtype: torch.dtype | Sequence[torch.dtype],
) -> None:
    """Check the outputs of a run of attention; `dtype` is that allowed for `out`."""
    if out is not None:
        check_tensor("out", out, shape=q.shape, dtype=dtype, device=q.device)
    if lse is not None:
        check_tensor("lse", lse, shape=q.shape[:2], dtype=torch.float32, device=q.device)


def check_layer(layer: int, num_layers: int) -> None:
    """Check a layer index."""
    check_int("layer", layer)
    if not 0 <= layer < num_layers:
        raise ShapeError(f"layer is {layer}, must be 0 to {num_layers - 1}")


def check_rows(q: Tensor, num_rows: int) -> None:
    """Check that queries have all rows of a plan."""
    if q.shape[0] < num_rows:
        raise ShapeError(f"q has {q.shape[0]} rows, must have at least the plan's {num_rows}")


def check_entries(name: str, table: Tensor | npt.NDArray[np.integer], num_entries: int) -> None:
    """Check that a page table, or an array of its borders, is long enough for a plan."""
    if table.shape[0] < num_entries:
        raise ShapeError(
            f"{name} has {table.shape[0]} entries, must have at least the plan's {num_entries}"
        )


def check_int(name: str, value: int, *, otherwise: str = "") -> None:
    """Check that a value is an int: Triton treats a bool differently, and rejects numpy integers.

    Args:
        name: Name of the value in the message.
        value: The value.
        otherwise: Other allowed values, for the message; the caller handles them.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise DtypeError(f"{name} is {value!r}, must be an int{otherwise}")


def check_number(name: str, value: float, *, otherwise: str = "") -> None:
    """Check that a value is a number; arguments as for `check_int`."""
    if not isinstance(value, Real):
        raise DtypeError(f"{name} is {value!r}, must be a number{otherwise}")


def check_at_least_one(name: str, value: int, *, otherwise: str = "") -> None:
    """Check a size that a launcher is made with; `otherwise` as of `check_int`."""
    check_int(name, value, otherwise=otherwise)
    if value < 1:
        raise ShapeError(f"{name} is {value}, must be at least 1{otherwise}")


def as_column(
    name: str, values: Integers, num_requests: int | None = None
) -> npt.NDArray[np.int64]:
    """Return a plan's per-request argument as int64, after checking one integer per request."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DtypeError(f"{name} is not a sequence of integers: {error}") from error
    # numpy treats an empty list as floats.
    if found.dtype.kind not in "iu" and (found.size or isinstance(values, np.ndarray)):
        raise DtypeError(f"{name} is {found.dtype}, must be integers of at most 64 bits")
    column = found.astype(np.int64, copy=False)
    if column.ndim != 1 or (num_requests is not None and len(column) != num_requests):
        wanted = "any" if num_requests is None else num_requests
        raise ShapeError(f"{name} has shape {list(column.shape)}, must be [{wanted}]")
    return column


def check_page_ids(
    page_ids: npt.NDArray[np.integer],
    num_pages: int,
    *,
    table_starts: npt.NDArray[np.int64],
    kv_lens: npt.NDArray[np.int64],
    num_entries: int,
    page_size: int,
) -> None:
    """Check the page table of a plan, on the host, against the pool.

    Args:
        page_ids: Page ids of all requests; unused entries may have any value.
        num_pages: Pages of the pool.
        table_starts: Index of each request's first page.
        kv_lens: Tokens of each request.
        num_entries: Where the last entry that a request uses ends.
        page_size: Tokens of a page.
    """
    if page_ids.ndim != 1:
        raise ShapeError(f"page_indices has shape {list(page_ids.shape)}, must be [any]")
    if page_ids.dtype.kind not in "iu":
        raise DtypeError(f"page_indices is {page_ids.dtype}, must be integers")
    check_entries("page_indices", page_ids, num_entries)
    if num_entries == 0:
        return
    # As unsigned numbers, negative ids are the largest: one pass over a mostly correct table.
    unsigned = page_ids[:num_entries].view(UNSIGNED[page_ids.dtype.itemsize])
    if np.maximum.reduce(unsigned) < num_pages:
        return
    entries = used_entries(table_starts, kv_lens, page_size)
    check_within("page_indices", page_ids[entries], num_pages, PageTableError, places=entries)


def used_entries(
    table_starts: npt.NDArray[np.int64],
    kv_lens: npt.NDArray[np.int64],
    page_size: int,
    first_tokens: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the page-table entries of tokens [first_token, kv_len) of all requests."""
    begins = table_starts if first_tokens is None else table_starts + first_tokens // page_size
    counts = np.maximum(table_starts + (kv_lens + page_size - 1) // page_size - begins, 0)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    entries: npt.NDArray[np.int64] = np.repeat(begins, counts) + within
    return entries


def check_within(
    name: str,
    values: npt.NDArray[np.integer],
    limit: int,
    error: type[KernelInputError],
    *,
    places: npt.NDArray[np.int64] | None = None,
    otherwise: str = "",
) -> None:
    """Check that values on the host are in [0, limit).

    Args:
        name: Name of the tensor in the message.
        values: Its values, or some of them.
        limit: Exclusive upper bound.
        error: Type of the error to raise.
        places: Index of each value in the tensor; None: 0, 1, 2, ...
        otherwise: Other allowed values, for the message; the caller handles them.
    """
    outside = np.flatnonzero((values < 0) | (values >= limit))
    if len(outside):
        first = outside[0]
        place = first if places is None else places[first]
        raise error(
            f"{name} has {values[first]} at index {place}, must be 0 to {limit - 1}{otherwise}"
        )
