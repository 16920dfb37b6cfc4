"""Joins attention over disjoint sets of keys into attention over their union."""

import torch
import triton
from torch import Tensor

from attn_kernels.checks import FLOAT_DTYPES, check_launchable, check_tensor
from attn_kernels.merge.bodies import merge_states_kernel
from attn_kernels.tiles import padded

BLOCK_M = 8


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over n disjoint sets of keys, in the order given.

    Args:
        outs: Output over each set, [n, num_tokens, num_qo_heads, head_dim], contiguous within a
            state, float32, float16 or bfloat16.
        lses: Its log-sum-exp (natural log), [n, num_tokens, num_qo_heads], float32. A row with
            lse -inf contributes nothing, whatever its output holds.

    Returns:
        The merged output (dtype of `outs`) and its log-sum-exp, newly allocated. A row that no
        state contributes to is 0 with lse -inf.
    """
    check_tensor(
        "outs",
        outs,
        shape=(None, None, None, None),
        dtype=FLOAT_DTYPES,
        device=None,
        contiguous_from=1,
    )
    check_launchable("outs", outs)
    num_states, num_tokens, num_heads, head_dim = outs.shape
    check_tensor(
        "lses",
        lses,
        shape=(num_states, num_tokens, num_heads),
        dtype=torch.float32,
        device=outs.device,
        contiguous_from=1,
    )
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=outs.dtype, device=outs.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=outs.device)
    num_rows = num_tokens * num_heads
    if num_rows:
        merge_states_kernel[(triton.cdiv(num_rows, BLOCK_M),)](
            out,
            lse,
            outs,
            lses,
            num_rows,
            outs.stride(0),
            lses.stride(0),
            NUM_STATES=num_states,
            HEAD_DIM=head_dim,
            BLOCK_M=BLOCK_M,
            BLOCK_D=padded(head_dim),
            num_warps=4,
        )
    return out, lse
