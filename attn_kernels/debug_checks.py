"""Checks that wait for the device; launchers run them only in the debug mode.

PAGEWIRE_KERNEL_CHECKS=1 in the environment, read when this module is imported, turns the mode on
for a process; off, it costs each launch the test of one attribute. Nothing is checked while a CUDA
graph is captured, when waiting is illegal, or replayed, nor inside `compiling_ahead`, where nothing
computes the values.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_kernels.checks import check_within, used_entries
from attn_kernels.compile_ahead import only_compiles
from attn_kernels.errors import KernelInputError, PageTableError, ScaleError, ShapeError


class DebugMode:
    """Whether launchers check values that only the device knows; one for all threads."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on


debug = DebugMode(is_on=os.environ.get("PAGEWIRE_KERNEL_CHECKS") == "1")


def on_host(tensor: Tensor) -> npt.NDArray[Any] | None:
    """Wait for the device and return a tensor's values; None where nothing is checked."""
    if only_compiles() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    values: npt.NDArray[Any] = tensor.cpu().numpy()
    return values


def check_values(
    name: str,
    tensor: Tensor,
    limit: int,
    error: type[KernelInputError] = PageTableError,
    *,
    or_negative: str | None = None,
) -> None:
    """Check that all values are in [0, limit), or negative if `or_negative` gives a meaning."""
    values = on_host(tensor)
    if values is None:
        return
    otherwise = ""
    if or_negative is not None:
        values, otherwise = np.maximum(values, 0), f", or negative for {or_negative}"
    check_within(name, values, limit, error, otherwise=otherwise)


def check_different(name: str, tensor: Tensor) -> None:
    """Check that no page is written twice, which would leave a mixture."""
    values = on_host(tensor)
    if values is None:
        return
    pages, counts = np.unique(values, return_counts=True)
    if np.any(counts > 1):
        raise PageTableError(f"{name} has page {pages[counts > 1][0]} twice, must be different")


def check_apart(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that no page is both written and read, which would leave a mixture."""
    values, others = on_host(tensor), on_host(other)
    if values is None or others is None:
        return
    common = np.intersect1d(values, others)
    if len(common):
        raise PageTableError(f"{name} has page {common[0]}, as has {other_name}, must be different")


def check_append(
    append_page: Tensor, append_offset: Tensor, positions: Tensor, *, pages: Tensor, cos: Tensor
) -> None:
    """Check where tokens are written, and the angles by which they are rotated."""
    check_values("positions", positions, cos.shape[0], ShapeError)
    _check_used_pairs(
        ("append_page", "append_offset"),
        (append_page, append_offset),
        (pages.shape[0], pages.shape[4]),
        PageTableError,
        unused="no write",
    )


def check_edits(edit_rows: Tensor, edit_tokens: Tensor, logits: Tensor) -> None:
    """Check which logits are edited."""
    num_rows, vocab_size = logits.shape
    _check_used_pairs(
        ("edits.rows", "edits.tokens"),
        (edit_rows, edit_tokens),
        (num_rows, vocab_size),
        ShapeError,
        unused="no entry",
    )


def check_scales(k_scale: Tensor | None, v_scale: Tensor | None, layer: int) -> None:
    """Check that the scales of a layer, if it has any, are positive and finite."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        values = None if scale is None else on_host(scale)
        if values is None:
            continue
        wrong = np.flatnonzero(~((values[layer] > 0) & np.isfinite(values[layer])))
        if len(wrong):
            raise ScaleError(
                f"{name} is {values[layer, wrong[0]]} for layer {layer} and key-value head "
                f"{wrong[0]}, must be positive and finite"
            )


def check_page_table(
    kv_page_indices: Tensor, entries: npt.NDArray[np.int64], num_pages: int
) -> None:
    """Check that the entries that a plan uses name pages of the pool."""
    page_ids = on_host(kv_page_indices)
    if page_ids is not None:
        name = "kv_page_indices"
        check_within(name, page_ids[entries], num_pages, PageTableError, places=entries)


def check_ragged_page_table(
    kv_page_indptr: Tensor,
    kv_page_indices: Tensor,
    *,
    requests: npt.NDArray[np.int64],
    first_tokens: npt.NDArray[np.int64],
    kv_lens: npt.NDArray[np.int64],
    pages: Tensor,
) -> None:
    """Check that tokens [first_token, kv_len) of the rows of a page table lie in the pool."""
    borders = on_host(kv_page_indptr)
    if borders is None:
        return
    num_pages, page_size = pages.shape[0], pages.shape[4]
    borders = borders.astype(np.int64)
    num_entries = kv_page_indices.shape[0]
    for request, kv_len in zip(requests.tolist(), kv_lens.tolist(), strict=True):
        begin, end = borders[request : request + 2].tolist()
        needed = -(-kv_len // page_size)
        if begin < 0 or end > num_entries or end - begin < needed:
            raise PageTableError(
                f"kv_page_indptr gives request {request} entries {begin} to {end}, must be "
                f"{needed} or more of the {num_entries} in kv_page_indices"
            )
    entries = used_entries(borders[requests], kv_lens, page_size, first_tokens)
    check_page_table(kv_page_indices, entries, num_pages)


def _check_used_pairs(
    names: tuple[str, str],
    tensors: tuple[Tensor, Tensor],
    limits: tuple[int, int],
    error: type[KernelInputError],
    *,
    unused: str,
) -> None:
    """Check pairs of values against their limits; if the first is negative, the pair is unused."""
    firsts, seconds = map(on_host, tensors)
    if firsts is None or seconds is None:
        return
    otherwise = f", or negative for {unused}"
    check_within(names[0], np.maximum(firsts, 0), limits[0], error, otherwise=otherwise)
    used = np.flatnonzero(firsts >= 0)
    check_within(names[1], seconds[used], limits[1], error, places=used)
