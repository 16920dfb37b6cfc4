"""Kernel body of log-probabilities: of the drawn token and of the most probable ones."""

import triton
import triton.language as tl

from attn_kernels.sampling.bodies import INFINITY, load_logits, sum_of_tiles
from attn_kernels.sampling.bodies_gumbel import NO_TOKEN


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    logprob_ptr,  # [num_rows], float32: of the drawn token
    top_logprob_ptr,  # [num_rows, num_top], float32
    top_token_ptr,  # [num_rows, num_top], int32; -1 where no token is left
    tokens_ptr,  # [num_rows], int32
    group_max_ptr,  # [num_rows, num_groups], float32
    tile_max_ptr,  # [num_rows, num_tiles], float32
    tile_sum_ptr,  # [num_rows, num_tiles], float32
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    vocab_size,
    num_groups,
    num_tiles,
    num_top,
    GROUP: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    # Grid: (num_rows,)
    my_row = tl.program_id(0).to(tl.int64)
    my_logits_ptr = logits_ptr + my_row * logits_stride
    groups = tl.arange(0, GROUPS_PADDED)
    # What is left of each group: its largest logit that was not taken yet.
    left = tl.load(
        group_max_ptr + my_row * num_groups + groups, mask=groups < num_groups, other=-INFINITY
    )
    row_max = tl.max(left, 0)
    row_sum = sum_of_tiles(
        tile_max_ptr + my_row * num_tiles,
        tile_sum_ptr + my_row * num_tiles,
        row_max,
        tl.full([], 1.0, tl.float64),
        num_tiles,
        TILES_PADDED,
    )
    lse = row_max.to(tl.float64) + tl.log(row_sum)
    token = tl.load(tokens_ptr + my_row)
    # A row without a token has no log-probability either.
    own = tl.load(my_logits_ptr + token, mask=token >= 0, other=float("nan")).to(tl.float64)
    tl.store(logprob_ptr + my_row, (own - lse).to(tl.float32))
    taken = tl.full([], INFINITY, tl.float32)
    taken_token = tl.full([], -1, tl.int32)
    for rank in range(num_top):
        best = tl.max(left, 0)
        group = tl.min(tl.where(left == best, groups, NO_TOKEN), 0)
        has_token = best > -INFINITY
        group = tl.where(has_token, group, 0)
        tokens = group * GROUP + tl.arange(0, GROUP)
        logits = load_logits(my_logits_ptr, my_logits_ptr, tokens, tokens < vocab_size, False)
        # Taken are, in this group as in all, those before (taken, taken_token) in the order.
        is_left = (logits < taken) | ((logits == taken) & (tokens > taken_token))
        token = tl.min(tl.where(is_left & (logits == best), tokens, NO_TOKEN), 0)
        token = tl.where(has_token, token, -1)
        tl.store(top_token_ptr + my_row * num_top + rank, token)
        tl.store(
            top_logprob_ptr + my_row * num_top + rank, (best.to(tl.float64) - lse).to(tl.float32)
        )
        is_left &= tokens != token
        rest = tl.max(tl.where(is_left, logits, -INFINITY), 0)
        left = tl.where(groups == group, rest, left)
        taken = best
        taken_token = token
