"""Rotary embedding fused with the write of keys and values to their pages."""

import torch
from torch import Tensor

from attn_kernels.append.bodies import rotate_and_append_kernel
from attn_kernels.chain import chained
from attn_kernels.checks import (
    check_heads,
    check_kv_scales,
    check_layer,
    check_pages,
    check_tensor,
    query_dtypes,
)
from attn_kernels.debug_checks import check_append, check_scales, debug
from attn_kernels.errors import ShapeError
from attn_kernels.tiles import padded


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layer: int,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    append_page: Tensor,
    append_offset: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate q and k by their positions, write k and v to their page slots, return the rotated q.

    The first rotary_dim dimensions of a head are rotated, in float32: dimension i is paired with
    i + rotary_dim / 2. The others are copied.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], dtype of the pool, or bfloat16 or float16 for an
            fp8 pool; tokens may have any stride.
        k, v: [num_tokens, num_kv_heads, head_dim], dtype of q, likewise.
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]; mutated.
        layer: Layer of the pool to write.
        cos, sin: [max_positions, rotary_dim / 2], float32, with 2 <= rotary_dim <= head_dim.
        positions: [num_tokens], int64, less than max_positions.
        append_page: [num_tokens], int64, page that receives the token; negative writes nothing.
        append_offset: [num_tokens], int64, slot within that page.
        k_scale, v_scale: [num_layers, num_kv_heads], float32, positive; for a pool of fp8 (e4m3)
            only. A page holds values divided by their head's scale; values beyond 448 then become
            448, with their sign, and NaN stays NaN.

    Returns:
        The rotated queries, newly allocated and contiguous.
    """
    check_pages(pages)
    check_kv_scales(pages, k_scale, v_scale)
    _, num_layers, _, num_kv_heads, page_size, head_dim = pages.shape
    device = pages.device
    check_tensor(
        "q",
        q,
        shape=(None, None, head_dim),
        dtype=query_dtypes(pages),
        device=device,
        contiguous_from=1,
    )
    num_tokens, num_qo_heads, _ = q.shape
    group = check_heads(num_qo_heads, num_kv_heads, head_dim)
    check_layer(layer, num_layers)
    for name, new in (("k", k), ("v", v)):
        check_tensor(
            name,
            new,
            shape=(num_tokens, num_kv_heads, head_dim),
            dtype=q.dtype,
            device=device,
            contiguous_from=1,
        )
    half = cos.shape[-1] if cos.dim() == 2 else head_dim // 2
    if not 1 <= half <= head_dim // 2:
        raise ShapeError(
            f"cos has {half} columns, must be 1 to {head_dim // 2}, half of head_dim {head_dim}"
        )
    check_tensor("cos", cos, shape=(None, half), dtype=torch.float32, device=device)
    check_tensor("sin", sin, shape=cos.shape, dtype=torch.float32, device=device)
    for name, index in (
        ("positions", positions),
        ("append_page", append_page),
        ("append_offset", append_offset),
    ):
        check_tensor(name, index, shape=(num_tokens,), dtype=torch.int64, device=device)
    if debug.is_on:
        check_scales(k_scale, v_scale, layer)
        check_append(append_page, append_offset, positions, pages=pages, cos=cos)

    q_out = torch.empty((num_tokens, num_qo_heads, head_dim), dtype=q.dtype, device=device)
    if num_tokens:
        rotate_and_append_kernel[(num_tokens, num_kv_heads)](
            q_out,
            q,
            k,
            v,
            pages,
            cos,
            sin,
            positions,
            append_page,
            append_offset,
            k_scale,
            v_scale,
            layer,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            pages.stride(0),
            pages.stride(1),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            HALF=half,
            PAGE_SIZE=page_size,
            BLOCK_G=padded(group),
            BLOCK_HALF=padded(half),
            BLOCK_REST=padded(head_dim - 2 * half) if half < head_dim // 2 else 0,
            num_warps=1,
            **chained(pages),
        )
    return q_out
