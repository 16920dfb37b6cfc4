"""Multilinear digest of pages, by which a receiver verifies a transfer."""

import torch
import triton
from torch import Tensor

from attn_kernels.checks import check_launchable, check_tensor
from attn_kernels.debug_checks import check_values, debug
from attn_kernels.errors import ShapeError
from attn_kernels.pages.bodies import digest_pages_kernel

BLOCK = 2048  # words of a program
PAGES_PER_PROGRAM = 16
MAX_DIGESTS = 65_535 * PAGES_PER_PROGRAM  # of a grid's second dimension


def digest_pages(words: Tensor, page_ids: Tensor, multipliers: Tensor) -> Tensor:
    """Return both lanes of each page's digest: the sums of words times multipliers, mod 2**64.

    Args:
        words: Pages as 32-bit words, [num_pages, page_words], int32, contiguous.
        page_ids: [n], int64, at most MAX_DIGESTS.
        multipliers: [2, page_words], int64; equal multipliers give equal digests on any device.

    Returns:
        [n, 2], int64, newly allocated.
    """
    device = words.device
    check_tensor("words", words, shape=(None, None), dtype=torch.int32, device=device)
    check_launchable("words", words)
    page_words = words.shape[1]
    check_tensor("page_ids", page_ids, shape=(None,), dtype=torch.int64, device=device)
    check_tensor(
        "multipliers", multipliers, shape=(2, page_words), dtype=torch.int64, device=device
    )
    if debug.is_on:
        check_values("page_ids", page_ids, words.shape[0])
    num_digests = page_ids.shape[0]
    if num_digests > MAX_DIGESTS:
        raise ShapeError(f"page_ids has {num_digests} entries, must have at most {MAX_DIGESTS}")
    lanes = torch.zeros((num_digests, 2), dtype=torch.int64, device=device)
    if num_digests:
        grid = (triton.cdiv(page_words, BLOCK), triton.cdiv(num_digests, PAGES_PER_PROGRAM))
        digest_pages_kernel[grid](
            lanes,
            words,
            page_ids,
            multipliers,
            num_digests,
            page_words,
            PAGES_PER_PROGRAM=PAGES_PER_PROGRAM,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return lanes
