"""Launches prefill attention in plain Triton: any GPU, head size, page size and dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_kernels.prefill.bodies import paged_prefill_kernel
from attn_kernels.prefill.plan import (
    ITEM_FIELDS,
    PrefillBatch,
    PrefillCapacity,
    idle_item,
    plan_items,
)
from attn_kernels.tiles import PlanBuffer, padded, score_factors, to_device


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
    if padded(head_dim) > 128 and element_bytes == 1:  # keys converted from fp8 take registers too
        return PrefillTile(block_m=64, block_n=64, num_warps=8, num_stages=3)
    if padded(head_dim) > 128:
        return PrefillTile(block_m=128, block_n=32, num_warps=8, num_stages=3)
    return PrefillTile(block_m=128, block_n=64, num_warps=8, num_stages=3)


class TritonPrefill:
    """Implements `attn_kernels.prefill.launch.PrefillKernel`."""

    def __init__(
        self,
        pages: Tensor,
        *,
        group: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
        capacity: PrefillCapacity | None,
        tile: PrefillTile,
    ) -> None:
        self._pages = pages
        self._group = group
        self._has_soft_cap = soft_cap is not None
        self._scale_log2, self._soft_cap_log2 = score_factors(scale, soft_cap)
        self._sliding_window = sliding_window
        self._k_scale = k_scale
        self._v_scale = v_scale
        self._tile = tile
        self._buffer: PlanBuffer | None = None
        self._has_work = False
        if capacity is None:
            self._items = torch.empty((0, ITEM_FIELDS), dtype=torch.int32, device=pages.device)
        else:
            max_items = capacity.max_items(group=group, block_m=tile.block_m)
            self._buffer = PlanBuffer(max_items * ITEM_FIELDS, pages.device)
            self._items = self._buffer.device_buffer.view(max_items, ITEM_FIELDS)

    def plan(self, batch: PrefillBatch) -> None:
        """Make the query tiles of a batch and copy them to the device."""
        items = plan_items(batch, group=self._group, block_m=self._tile.block_m)
        self._has_work = len(items) > 0
        if not self._has_work:
            return
        if self._buffer is None:
            self._items = to_device(items, self._pages.device)
            return
        sent = self._buffer.host().reshape(-1, ITEM_FIELDS)
        sent[: len(items)] = items
        sent[len(items) :] = idle_item(items)
        self._buffer.send(sent.size)

    def check(self, out: Tensor, q: Tensor) -> None:
        """Require nothing more of a run's tensors."""

    def launch(
        self,
        out: Tensor,
        lse: Tensor | None,
        q: Tensor,
        layer: int,
        kv_page_indptr: Tensor,
        kv_page_indices: Tensor,
    ) -> None:
        """Attend in one layer; the arguments are checked."""
        _, _, _, num_kv_heads, page_size, head_dim = self._pages.shape
        if not self._has_work:
            return
        num_programs = self._items.shape[0] * num_kv_heads
        paged_prefill_kernel[(num_programs,)](
            out,
            lse if lse is not None else out,
            q,
            self._pages,
            kv_page_indptr,
            kv_page_indices,
            self._items,
            self._k_scale,
            self._v_scale,
            layer,
            self._pages.stride(0),
            self._pages.stride(1),
            self._scale_log2,
            self._soft_cap_log2,
            self._sliding_window or 0,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_M=self._tile.block_m,
            BLOCK_N=self._tile.block_n,
            BLOCK_D=padded(head_dim),
            ITEM_FIELDS=ITEM_FIELDS,
            HAS_WINDOW=self._sliding_window is not None,
            HAS_SOFT_CAP=self._has_soft_cap,
            HAS_LSE=lse is not None,
            num_stages=self._tile.num_stages,
            num_warps=self._tile.num_warps,
        )
