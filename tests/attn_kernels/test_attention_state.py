"""The tile of few query rows and the tile of many: one softmax, and on a GPU the same bits."""

import pytest
import torch
import triton
import triton.language as tl

from attn_kernels.attention_state import (
    attend_columns,
    attend_rows,
    sum_columns,
    sum_rows,
)
from attn_kernels.tiles import LOG2_E
from tests.support.rarely import rarely


@triton.jit
def _columns_kernel(
    acc_ptr,  # [num_rows, HEAD_DIM]
    stats_ptr,  # [num_rows, 2]: m, total
    q_ptr,  # [num_rows, HEAD_DIM]
    k_ptr,  # [num_keys, HEAD_DIM]
    v_ptr,
    num_keys,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # Grid: (num_rows / GROUP,)
    columns, dims, keys = tl.arange(0, 16), tl.arange(0, HEAD_DIM), tl.arange(0, 64)
    rows = tl.program_id(0) * GROUP + columns
    is_row = columns < GROUP
    offsets = rows[None, :] * HEAD_DIM + dims[:, None]
    q = tl.load(q_ptr + offsets, mask=is_row[None, :], other=0.0)
    acc = tl.zeros([HEAD_DIM, 16], dtype=tl.float32)
    m = tl.full([16], float("-inf"), dtype=tl.float32)
    total = tl.zeros([32, 16], dtype=tl.float32)
    for start in tl.range(0, num_keys, 64):
        tile = (start + keys)[:, None] * HEAD_DIM + dims[None, :]
        k, v = tl.load(k_ptr + tile), tl.load(v_ptr + tile)
        acc, m, total = attend_columns(q, k, v, keys >= 0, acc, m, total, 0.125, 0.0, False)
    tl.store(acc_ptr + offsets, acc, mask=is_row[None, :])
    tl.store(stats_ptr + rows * 2, m, mask=is_row)
    tl.store(stats_ptr + rows * 2 + 1, sum_columns(total), mask=is_row)


@triton.jit
def _rows_kernel(
    acc_ptr,
    stats_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_keys,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    # Grid: (num_rows / BLOCK_M,); arguments as of _columns_kernel
    dims, keys = tl.arange(0, HEAD_DIM), tl.arange(0, 64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + offsets)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M, 32], dtype=tl.float32)
    for start in tl.range(0, num_keys, 64):
        tile = (start + keys) * HEAD_DIM
        k = tl.load(k_ptr + tile[None, :] + dims[:, None])
        v = tl.load(v_ptr + tile[:, None] + dims[None, :])
        acc, m, total = attend_rows(q, k, v, acc, m, total, 0.125, 0.0, False)
    tl.store(acc_ptr + offsets, acc)
    tl.store(stats_ptr + rows * 2, m)
    tl.store(stats_ptr + rows * 2 + 1, sum_rows(total))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (128, torch.float16),
        *rarely((64, torch.float16), (128, torch.bfloat16)),
    ],
)
def test_narrow_and_wide_tiles_of_queries_give_the_same_bits(
    head_dim: int, dtype: torch.dtype, device: str
):
    generator = torch.Generator(device=device).manual_seed(0)

    def random(num_rows: int, num_columns: int) -> torch.Tensor:
        return torch.randn(num_rows, num_columns, generator=generator, device=device)

    num_keys = 512 if device == "cuda" else 128  # two tiles: one that follows another
    far_exponents = torch.exp(random(num_keys, 1))
    q, k, v = (random(num_rows, head_dim) for num_rows in (128, num_keys, num_keys))
    k *= far_exponents
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    weights = torch.softmax(q.float() @ k.float().T * (0.125 / LOG2_E), 1)
    reference = weights @ v.float()
    states = []
    for kernel, rows, num_warps in (
        (_columns_kernel, 4, 4),
        (_columns_kernel, 16, 4),
        (_rows_kernel, 64, 4),
        (_rows_kernel, 128, 8),
    ):
        acc, stats = torch.zeros(q.shape, device=device), torch.zeros(128, 2, device=device)
        kernel[(128 // rows,)](
            acc, stats, q, k, v, num_keys, rows, head_dim, num_warps=num_warps, num_stages=3
        )
        states.append((acc, stats))

    for acc, stats in states:
        torch.testing.assert_close(acc / stats[:, 1:], reference, atol=0.02, rtol=0.02)
        if device == "cuda":  # the interpreter's matrix product sums in an order of its own
            assert torch.equal(acc, states[0][0])
            assert torch.equal(stats, states[0][1])
