"""Checks of tensors that cost no synchronization; each raises what errors.py names."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from attn_kernels.errors import (
    DeviceError,
    DtypeError,
    PageTableError,
    ScaleError,
    ShapeError,
    StrideError,
)

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32)
FP8_DTYPE = torch.float8_e4m3fn  # of pools only, with a scale for each head
MAX_HEAD_DIM = 256
MAX_GROUP = 16


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    contiguous_from: int = 0,
) -> None:
    """Check one argument.

    Args:
        name: How the message calls the tensor.
        tensor: The tensor.
        shape: The size of each dimension; None allows any.
        dtype: The dtype, or those allowed.
        device: The device of the launch.
        contiguous_from: First dimension of the part that must be contiguous; the dimensions
            before it may have any stride.
    """
    # Some twenty of these precede the launches of a layer, and it is the host that takes longest.
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if tensor.dtype not in allowed:
        raise DtypeError(f"{name} is {tensor.dtype}, must be {' or '.join(map(str, allowed))}")
    if not _has_shape(tensor, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ShapeError(f"{name} has shape {list(tensor.shape)}, must be [{wanted}]")
    if tensor.device != device:
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


def check_launchable(name: str, tensor: Tensor) -> None:
    """Check that Triton can run on the tensor's device (the CPU only in the interpreter)."""
    if tensor.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise DeviceError(f"{name} is on {tensor.device}, must be on a CUDA device")


def check_heads(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Check head counts; return the group size (query heads of one key-value head)."""
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ShapeError(
            f"num_qo_heads {num_qo_heads} must be a multiple of num_kv_heads {num_kv_heads}"
        )
    group = num_qo_heads // num_kv_heads
    if not 1 <= group <= MAX_GROUP:
        raise ShapeError(f"{group} query heads per key-value head, must be 1 to {MAX_GROUP}")
    if not 16 <= head_dim <= MAX_HEAD_DIM or head_dim % 16:
        raise ShapeError(f"head_dim is {head_dim}, must be a multiple of 16 up to {MAX_HEAD_DIM}")
    return group


def check_pages(pages: Tensor) -> None:
    """Check a pool [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]."""
    check_tensor(
        "pages",
        pages,
        shape=(None, None, 2, None, None, None),
        dtype=(*FLOAT_DTYPES, FP8_DTYPE),
        device=pages.device,
    )
    check_launchable("pages", pages)


def query_dtypes(pages: Tensor) -> tuple[torch.dtype, ...]:
    """Return what queries over a pool may be: its own dtype, or half precision over fp8."""
    return HALF_DTYPES if pages.dtype == FP8_DTYPE else (pages.dtype,)


def check_kv_scales(pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Check that an fp8 pool has scales [num_layers, num_kv_heads], float32, and no other has."""
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


def check_positive_scales(k_scale: Tensor, v_scale: Tensor) -> None:
    """Check that scales are positive and finite. For debugging: it waits for the device."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        wrong = ~((scale > 0) & scale.isfinite())
        if bool(wrong.any()):
            layer, head = wrong.nonzero()[0].tolist()
            raise ScaleError(
                f"{name} is {float(scale[layer, head])} for layer {layer} and key-value head "
                f"{head}, must be positive and finite"
            )


def check_mask(sliding_window: int | None, soft_cap: float | None) -> None:
    """Check what changes the scores of an attention kernel."""
    if sliding_window is not None and sliding_window < 1:
        raise ShapeError(f"sliding_window is {sliding_window}, must be at least 1 or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ShapeError(f"soft_cap is {soft_cap}, must be positive or None")


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
    out: Tensor, lse: Tensor | None, q: Tensor, *, dtype: torch.dtype | Sequence[torch.dtype]
) -> None:
    """Check where a run of attention writes; `dtype` is what `out` may be."""
    check_tensor("out", out, shape=q.shape, dtype=dtype, device=q.device)
    if lse is not None:
        check_tensor("lse", lse, shape=q.shape[:2], dtype=torch.float32, device=q.device)


def check_layer(layer: int, num_layers: int) -> None:
    """Check a layer index."""
    if not 0 <= layer < num_layers:
        raise ShapeError(f"layer is {layer}, must be 0 to {num_layers - 1}")


def check_page_table(
    kv_page_indptr: Tensor, kv_page_indices: Tensor, kv_last_page_len: Tensor, pages: Tensor
) -> None:
    """Check a page table against the pool. For debugging: it waits for the device."""
    num_pages, page_size = pages.shape[0], pages.shape[4]
    indptr = kv_page_indptr.cpu()
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise PageTableError("kv_page_indptr must begin with 0 and never fall")
    if int(indptr[-1]) > kv_page_indices.numel():
        raise PageTableError(
            f"kv_page_indptr ends with {int(indptr[-1])}, kv_page_indices has "
            f"{kv_page_indices.numel()} entries"
        )
    used = kv_page_indices[: int(indptr[-1])]
    outside = used[(used < 0) | (used >= num_pages)]
    if outside.numel():
        raise PageTableError(f"page {int(outside[0])} is outside the pool of {num_pages} pages")
    wrong = kv_last_page_len[(kv_last_page_len < 1) | (kv_last_page_len > page_size)]
    if wrong.numel():
        raise PageTableError(f"kv_last_page_len {int(wrong[0])} must be 1 to {page_size}")
