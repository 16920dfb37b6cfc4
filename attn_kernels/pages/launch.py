"""Copies whole pages by id: to and from contiguous staging, within a pool, and between pools.

Staging lies on the pool's device, for transfer, or in pinned host memory, for a tier of pages on
the host: the kernel addresses either directly.
"""

import torch
import triton
from torch import Tensor

from attn_kernels.checks import check_launchable, check_own_memory, check_staging, check_tensor
from attn_kernels.debug_checks import check_apart, check_different, check_values, debug
from attn_kernels.errors import DeviceError, ShapeError
from attn_kernels.pages.bodies import copy_pages_kernel

WORD_BYTES = 4
MAX_PAGE_BYTES = 1 << 30  # word indices within a page are 32-bit
BLOCK = 8192  # words of a program: 8 vectors of 16 bytes in flight per thread
ID_DTYPES = (torch.int64, torch.int32)


def gather_pages(pages: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    """Copy pages by id into staging, in the order given, on the current stream.

    The host is not waited for. Before it reads pinned staging, writes there or frees it, it must
    wait for the stream, by an event recorded after this call: torch's allocator of pinned memory
    does not know that a kernel uses it.

    Args:
        pages: [num_pages, ...], any dtype, contiguous; a page is a multiple of 4 bytes.
        page_ids: [n], int32 or int64, on the device of `pages` wherever staging lies.
        staging: At least n pages: [>= n, ...] with the page size of `pages` in bytes, contiguous,
            any dtype, on the device of `pages` but not in their memory, or in pinned host memory;
            the first n are written.

    Raises:
        DeviceError: If staging is in host memory that is not pinned, or on another device.
        KernelInputError: If staging and `pages` share memory.
    """
    check_staging(staging, pages)
    _copy(pages, page_ids, staging, None)


def scatter_pages(staging: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """Copy the first n pages of staging to the pages with the ids given; see `gather_pages`."""
    check_staging(staging, pages)
    _copy(staging, None, pages, page_ids)


def copy_pages(pages: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy pages within a pool; no page may be both a source and a target."""
    _copy(pages, source_ids, pages, target_ids)


def copy_between(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy pages by id into pages of another pool on the same device, as `copy_pages` does."""
    if target.device != source.device:
        raise DeviceError(f"target is on {target.device}, must be on {source.device}")
    check_own_memory("target", target, "source", source)
    _copy(source, source_ids, target, target_ids)


def page_words(name: str, pages: Tensor) -> Tensor:
    """Return pages of any dtype as int32 words, [num_pages, words of a page]."""
    check_tensor(name, pages, shape=(None,) * pages.dim(), dtype=pages.dtype, device=pages.device)
    if pages.dim() < 2 or pages.shape[0] < 1:
        raise ShapeError(f"{name} has shape {list(pages.shape)}, must be [num_pages, ...]")
    flat = pages.reshape(pages.shape[0], -1)
    page_bytes = flat.shape[1] * pages.element_size()
    if page_bytes == 0 or page_bytes % WORD_BYTES or page_bytes > MAX_PAGE_BYTES:
        raise ShapeError(
            f"a page of {name} has {page_bytes} bytes, must be a multiple of {WORD_BYTES} up to "
            f"{MAX_PAGE_BYTES}"
        )
    if pages.data_ptr() % WORD_BYTES:
        raise ShapeError(f"{name} must begin at a multiple of {WORD_BYTES} bytes")
    return flat.view(torch.int32)


def _copy(
    source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None
) -> None:
    sources = page_words("source", source)
    targets = page_words("target", target)
    if sources.shape[1] != targets.shape[1]:
        raise ShapeError(
            f"pages have {sources.shape[1] * WORD_BYTES} bytes at the source and "
            f"{targets.shape[1] * WORD_BYTES} at the target, must be equal"
        )
    sides = (("source", source_ids, sources), ("target", target_ids, targets))
    counts = set()
    for name, ids, words in sides:
        if ids is not None:  # words is a pool, else staging
            check_launchable(name, words)
            check_tensor(f"{name}_ids", ids, shape=(None,), dtype=ID_DTYPES, device=words.device)
            counts.add(ids.shape[0])
    if len(counts) != 1:
        raise ShapeError(f"source_ids and target_ids have lengths {sorted(counts)}, must be equal")
    (num_copies,) = counts
    for name, ids, words in sides:
        if ids is None and words.shape[0] < num_copies:
            raise ShapeError(f"{name} holds {words.shape[0]} pages, {num_copies} ids were given")
    if num_copies == 0:
        return
    if debug.is_on:
        for name, ids, words in sides:
            if ids is not None:
                check_values(f"{name}_ids", ids, words.shape[0])
        if target_ids is not None:
            check_different("target_ids", target_ids)
            if source is target and source_ids is not None:
                check_apart("target_ids", target_ids, "source_ids", source_ids)
    num_words = sources.shape[1]
    block = min(BLOCK, triton.next_power_of_2(num_words))
    copy_pages_kernel[(num_copies * triton.cdiv(num_words, block),)](
        targets,
        sources,
        target_ids if target_ids is not None else targets,
        source_ids if source_ids is not None else sources,
        num_words,
        HAS_TARGET_IDS=target_ids is not None,
        HAS_SOURCE_IDS=source_ids is not None,
        BLOCK=block,
        num_warps=8,
    )
