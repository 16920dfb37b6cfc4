"""Paged prefill attention: causal, ragged batch, each request a chunk over an existing prefix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attn_kernels.checks import FLOAT_DTYPES, check_heads, check_layer, check_pages, check_tensor
from attn_kernels.errors import ShapeError
from attn_kernels.jit.paged_prefill import paged_prefill_kernel
from attn_kernels.tiles import LOG2_E, padded

ITEM_FIELDS = 5  # request, first row, qo_len, kv_len, tile


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTile:
    """How the kernel is compiled; one choice for all chunks, or their bits would differ."""

    block_m: int  # rows: a token and one of the query heads of a key-value head
    block_n: int  # keys
    num_warps: int
    num_stages: int


def prefill_tile(head_dim: int, element_bytes: int) -> PrefillTile:
    """Return the tile for a head size: what fits 227 KB of shared memory without spills."""
    if element_bytes == 4:  # no tensor cores in full float32: for tests, not for speed
        return PrefillTile(block_m=16, block_n=16, num_warps=4, num_stages=2)
    if padded(head_dim) > 128:
        return PrefillTile(block_m=128, block_n=32, num_warps=8, num_stages=3)
    return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3)


class PrefillAttention:
    """Causal attention of the last `qo_len` tokens of each request over all its tokens.

    A token's result does not depend on its batch mates, its physical pages, or how its prompt was
    cut into chunks.

    Args:
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous.
        num_qo_heads: Query heads, 1 to 16 for each key-value head.
        scale: Factor of the scores, usually head_dim ** -0.5.
        sliding_window: Number of last tokens that a query sees, itself included; None is all.
        tile: How the kernel is compiled; None takes the shipped choice.
    """

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        sliding_window: int | None = None,
        tile: PrefillTile | None = None,
    ) -> None:
        check_pages(pages)
        _, _, _, num_kv_heads, _, head_dim = pages.shape
        self.group = check_heads(num_qo_heads, num_kv_heads, head_dim)
        if sliding_window is not None and sliding_window < 1:
            raise ShapeError(f"sliding_window is {sliding_window}, must be at least 1 or None")
        self.pages = pages
        self.num_qo_heads = num_qo_heads
        self.scale_log2 = scale * LOG2_E
        self.sliding_window = sliding_window
        self.tile = tile or prefill_tile(head_dim, pages.element_size())
        self._items = torch.empty((0, ITEM_FIELDS), dtype=torch.int32, device=pages.device)

    def plan(
        self,
        qo_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        first_rows: Sequence[int] | None = None,
        requests: Sequence[int] | None = None,
    ) -> None:
        """Make the work items of a batch and copy them to the device.

        Args:
            qo_lens: New tokens of each request, its last ones.
            kv_lens: All tokens of each request.
            first_rows: Row of each request's first new token in q; None packs them in order.
            requests: Row of each request in the page table; None is 0, 1, 2, ...
        """
        for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
            if not 0 <= qo_len <= kv_len:
                raise ShapeError(f"{qo_len} new tokens of {kv_len}, must be 0 to all of them")
        new = np.asarray(qo_lens, dtype=np.int64)
        lens = np.asarray(kv_lens, dtype=np.int64)
        rows = np.cumsum(new) - new if first_rows is None else np.asarray(first_rows)
        table_rows = np.arange(len(new)) if requests is None else np.asarray(requests)
        num_tiles = -(-new * self.group // self.tile.block_m)
        owner = np.repeat(np.arange(len(new)), num_tiles)
        tile = np.arange(len(owner)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        last_token = np.minimum((tile + 1) * self.tile.block_m // self.group, new[owner])
        keys = lens[owner] - new[owner] + last_token
        order = np.argsort(-keys, kind="stable")  # longest first: short ones fill the end
        columns = (table_rows[owner], rows[owner], new[owner], lens[owner], tile)
        items = torch.from_numpy(np.stack(columns, axis=1)[order].astype(np.int32))
        if self.pages.is_cuda:
            items = items.pin_memory()
        self._items = items.to(self.pages.device, non_blocking=True)

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indptr: Tensor,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer.

        Args:
            q: Rotated queries, [num_rows, num_qo_heads, head_dim], contiguous, dtype of the pool.
            layer: Layer of the pool; it already holds the new tokens' keys and values.
            kv_page_indptr: First page-table entry of each request, [num_requests + 1], int32.
            kv_page_indices: Page ids of all requests, int32.
            out: Written at the planned rows; None makes a new one. Other rows are left as they are.
            lse: If given, [num_rows, num_qo_heads], float32, receives the log-sum-exp of the
                scores (natural log).

        Returns:
            The output, shaped as q.
        """
        _, num_layers, _, num_kv_heads, page_size, head_dim = self.pages.shape
        device = self.pages.device
        heads = (q.shape[0], self.num_qo_heads)
        check_tensor(
            "q", q, shape=(None, self.num_qo_heads, head_dim), dtype=self.pages.dtype, device=device
        )
        check_layer(layer, num_layers)
        check_tensor(
            "kv_page_indptr", kv_page_indptr, shape=(None,), dtype=torch.int32, device=device
        )
        check_tensor(
            "kv_page_indices", kv_page_indices, shape=(None,), dtype=torch.int32, device=device
        )
        if out is None:
            out = torch.empty_like(q)
        check_tensor("out", out, shape=(*heads, head_dim), dtype=FLOAT_DTYPES, device=device)
        if lse is not None:
            check_tensor("lse", lse, shape=heads, dtype=torch.float32, device=device)

        num_units = self._items.shape[0] * num_kv_heads
        if num_units == 0:
            return out
        paged_prefill_kernel[(num_units,)](
            out,
            lse if lse is not None else out,
            q,
            self.pages,
            kv_page_indptr,
            kv_page_indices,
            self._items,
            layer,
            self.pages.stride(0),
            self.pages.stride(1),
            self.scale_log2,
            self.sliding_window or 0,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_M=self.tile.block_m,
            BLOCK_N=self.tile.block_n,
            BLOCK_D=padded(head_dim),
            ITEM_FIELDS=ITEM_FIELDS,
            HAS_WINDOW=self.sliding_window is not None,
            HAS_LSE=lse is not None,
            num_stages=self.tile.num_stages,
            num_warps=self.tile.num_warps,
        )
        return out
