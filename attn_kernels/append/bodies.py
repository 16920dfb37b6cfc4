"""Kernel body that rotates queries and keys by position and writes keys and values to pages."""

import triton
import triton.language as tl

from attn_kernels.chain import wait_for_launch_before

FP8_MAX = tl.constexpr(448.0)  # of e4m3


@triton.jit
def rotate(x_low, x_high, cos, sin):
    # The two halves of [heads, rotary_dim], float32; cos and sin [1, rotary_dim / 2].
    return x_low * cos - x_high * sin, x_high * cos + x_low * sin


@triton.jit
def to_page(x, scale):
    # A page's value for x: x, or x / scale in fp8 if there is a scale. Values beyond e4m3's range
    # become its largest value; NaN is neither above nor below, and stays.
    if scale is not None:
        x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
        x = x.to(tl.float8e4nv)
    return x


@triton.jit(do_not_specialize=["layer"])
def rotate_and_append_kernel(
    q_out_ptr,  # [num_tokens, num_qo_heads, head_dim], contiguous
    q_ptr,  # [num_tokens, num_qo_heads, head_dim]
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # [num_tokens, num_kv_heads, head_dim]
    pages_ptr,  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    cos_ptr,  # [max_positions, rotary_dim / 2], float32
    sin_ptr,  # the same
    positions_ptr,  # [num_tokens], int64
    append_page_ptr,  # [num_tokens], int64; negative: this token is padding, nothing is written
    append_offset_ptr,  # [num_tokens], int64
    k_scale_ptr,  # [num_layers, num_kv_heads], float32; None unless pages are fp8
    v_scale_ptr,  # the same
    layer,
    q_stride,  # elements from token to token
    k_stride,
    v_stride,
    page_stride,
    layer_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # of the dimensions that are rotated, the first ones
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, padded to a power of two
    BLOCK_HALF: tl.constexpr,  # HALF, padded to a power of two
    BLOCK_REST: tl.constexpr,  # the other dimensions, padded to a power of two, or 0
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_tokens, num_kv_heads)
    if IS_CHAINED:
        wait_for_launch_before()
    my_token = tl.program_id(0).to(tl.int64)
    my_kv_head = tl.program_id(1)
    heads = tl.arange(0, BLOCK_G)[:, None]  # [BLOCK_G, 1]
    dims = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    is_dim = dims < HALF
    my_position = tl.load(positions_ptr + my_token)
    cos = tl.load(cos_ptr + my_position * HALF + dims, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + my_position * HALF + dims, mask=is_dim, other=0.0)

    in_q = (heads < GROUP) & is_dim
    in_heads = (my_kv_head * GROUP + heads) * HEAD_DIM + dims
    my_q_ptr = q_ptr + my_token * q_stride + in_heads
    q_low = tl.load(my_q_ptr, mask=in_q, other=0.0).to(tl.float32)
    q_high = tl.load(my_q_ptr + HALF, mask=in_q, other=0.0).to(tl.float32)
    q_low, q_high = rotate(q_low, q_high, cos, sin)
    my_out_ptr = q_out_ptr + my_token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + in_heads
    tl.store(my_out_ptr, q_low, mask=in_q)
    tl.store(my_out_ptr + HALF, q_high, mask=in_q)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        is_rest = rest < HEAD_DIM
        in_q_rest = (heads < GROUP) & is_rest
        in_heads_rest = (my_kv_head * GROUP + heads) * HEAD_DIM + rest
        q_rest = tl.load(q_ptr + my_token * q_stride + in_heads_rest, mask=in_q_rest)
        my_rest_ptr = q_out_ptr + my_token * (NUM_KV_HEADS * GROUP * HEAD_DIM) + in_heads_rest
        tl.store(my_rest_ptr, q_rest, mask=in_q_rest)

    my_page = tl.load(append_page_ptr + my_token)
    is_written = is_dim & (my_page >= 0)
    in_page = my_kv_head * PAGE_SIZE + tl.load(append_offset_ptr + my_token)
    my_slot_ptr = pages_ptr + my_page * page_stride + layer * layer_stride + in_page * HEAD_DIM
    my_k_ptr = k_ptr + my_token * k_stride + my_kv_head * HEAD_DIM + dims
    k_low = tl.load(my_k_ptr, mask=is_dim, other=0.0).to(tl.float32)
    k_high = tl.load(my_k_ptr + HALF, mask=is_dim, other=0.0).to(tl.float32)
    k_low, k_high = rotate(k_low, k_high, cos, sin)
    k_scale = None
    v_scale = None
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)
        v_scale = tl.load(v_scale_ptr + layer * NUM_KV_HEADS + my_kv_head)
    tl.store(my_slot_ptr + dims, to_page(k_low, k_scale), mask=is_written)
    tl.store(my_slot_ptr + HALF + dims, to_page(k_high, k_scale), mask=is_written)

    my_v_ptr = v_ptr + my_token * v_stride + my_kv_head * HEAD_DIM + dims
    v_slot_ptr = my_slot_ptr + NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
    tl.store(v_slot_ptr + dims, to_page(tl.load(my_v_ptr, mask=is_dim), v_scale), mask=is_written)
    tl.store(
        v_slot_ptr + HALF + dims,
        to_page(tl.load(my_v_ptr + HALF, mask=is_dim), v_scale),
        mask=is_written,
    )

    if BLOCK_REST > 0:
        is_rest_written = is_rest & (my_page >= 0)
        in_head = my_kv_head * HEAD_DIM + rest
        k_rest = tl.load(k_ptr + my_token * k_stride + in_head, mask=is_rest)
        v_rest = tl.load(v_ptr + my_token * v_stride + in_head, mask=is_rest)
        tl.store(my_slot_ptr + rest, to_page(k_rest, k_scale), mask=is_rest_written)
        tl.store(v_slot_ptr + rest, to_page(v_rest, v_scale), mask=is_rest_written)
