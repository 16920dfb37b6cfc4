"""Paged prefill attention: causal, ragged batch, each request a chunk over an existing prefix."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attn_kernels.checks import (
    Integers,
    check_attention_inputs,
    check_attention_outputs,
    check_entries,
    check_heads,
    check_kv_scales,
    check_pages,
    check_rows,
    check_scores,
    check_tensor,
)
from attn_kernels.debug_checks import check_ragged_page_table, check_scales, debug
from attn_kernels.errors import PlanError, ShapeError
from attn_kernels.prefill import launch_hopper
from attn_kernels.prefill.launch_hopper import HopperPrefill, HopperTile
from attn_kernels.prefill.launch_triton import PrefillTile, TritonPrefill, prefill_tile
from attn_kernels.prefill.plan import (
    PrefillBatch,
    PrefillCapacity,
    PrefillNeeds,
    check_batch,
    needs_of,
)


class PrefillKernel(Protocol):
    """A kernel with its plan of a batch; arguments are those of `PrefillAttention`, checked."""

    def plan(self, batch: PrefillBatch) -> None: ...

    def check(self, out: Tensor, q: Tensor) -> None: ...

    def launch(
        self,
        out: Tensor,
        lse: Tensor | None,
        q: Tensor,
        layer: int,
        kv_page_indptr: Tensor,
        kv_page_indices: Tensor,
    ) -> None: ...


def shipped_tile(pages: Tensor, soft_cap: float | None) -> PrefillTile | HopperTile:
    """Return which kernel runs for a pool, and its tile."""
    if soft_cap is None and launch_hopper.is_for(pages):
        return HopperTile()
    return prefill_tile(pages.shape[-1], pages.element_size())


class PrefillAttention:
    """Causal attention of the last `qo_len` tokens of each request over all its tokens.

    A token's result does not depend on its batch mates, its physical pages, or how its prompt was
    cut into chunks. There are two kernels, whose bits differ: one for Hopper GPUs and the usual
    head and page sizes in half precision without soft cap, and one in plain Triton for everything
    else, fp8 included.

    Args:
        pages: The pool, [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous.
        num_qo_heads: Query heads, 1 to 16 for each key-value head.
        scale: Factor of the scores, usually head_dim ** -0.5.
        sliding_window: Number of last tokens that a query sees, itself included; None is all.
        soft_cap: If given, a score s becomes soft_cap * tanh(s / soft_cap).
        k_scale, v_scale: What keys and values of a pool of fp8 (e4m3) are multiplied by,
            [num_layers, num_kv_heads], float32, positive; None for any other pool.
        capacity: If given, plans lie in fixed buffers for batches up to this one, and all of them
            make the same launches: a CUDA graph of one repeats any. For small batches, since
            programs that a batch leaves idle are launched, too.
        tile: Which kernel runs and how it is compiled; None takes the shipped choice.
    """

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        capacity: PrefillCapacity | None = None,
        tile: PrefillTile | HopperTile | None = None,
    ) -> None:
        check_pages(pages)
        check_kv_scales(pages, k_scale, v_scale)
        _, _, _, num_kv_heads, _, head_dim = pages.shape
        group = check_heads(num_qo_heads, num_kv_heads, head_dim)
        check_scores(scale, sliding_window, soft_cap)
        self.pages = pages
        self.num_qo_heads = num_qo_heads
        self.tile = tile or shipped_tile(pages, soft_cap)
        self._capacity = capacity
        self._sliding_window = sliding_window
        self._k_scale, self._v_scale = k_scale, v_scale
        self._batch: PrefillBatch
        self._needs: PrefillNeeds | None = None  # of the last plan
        self._kernel: PrefillKernel
        if isinstance(self.tile, HopperTile):
            if soft_cap is not None:
                raise ShapeError(f"soft_cap is {soft_cap}, the Hopper kernel takes none")
            self._kernel = HopperPrefill(
                pages,
                group=group,
                scale=scale,
                sliding_window=sliding_window,
                capacity=capacity,
                tile=self.tile,
            )
        else:
            self._kernel = TritonPrefill(
                pages,
                group=group,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                k_scale=k_scale,
                v_scale=v_scale,
                capacity=capacity,
                tile=self.tile,
            )

    def plan(
        self,
        qo_lens: Integers,
        kv_lens: Integers,
        *,
        first_rows: Integers | None = None,
        requests: Integers | None = None,
    ) -> None:
        """Make the work items of a batch and copy them to the device.

        Args:
            qo_lens: New tokens of each request, its last ones.
            kv_lens: All tokens of each request.
            first_rows: Row of each request's first new token in q; None packs them in order.
            requests: Row of each request in the page table; None is 0, 1, 2, ...

        Raises:
            ShapeError: If arguments differ in length, a request has more new tokens than tokens, or
                fewer than none, or a row is negative or of two requests.
            CapacityError: If the batch is larger than the capacity.
        """
        batch = check_batch(qo_lens, kv_lens, first_rows=first_rows, requests=requests)
        if self._capacity is not None:
            self._capacity.check(batch)
        needs = needs_of(batch, self.pages.shape[4])
        self._kernel.plan(batch)
        # Only now: a batch that is refused leaves the last plan as it was.
        self._batch, self._needs = batch, needs

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
            q: Rotated queries, [num_rows, num_qo_heads, head_dim], contiguous, dtype of the pool,
                or bfloat16 or float16 for one of fp8.
            layer: Layer of the pool; it already holds the new tokens' keys and values.
            kv_page_indptr: First page-table entry of each request, [num_requests + 1], int32.
            kv_page_indices: Page ids of all requests, int32.
            out: Shaped as q, with its dtype; None makes a new one. Written at the planned rows,
                other rows are left as they are.
            lse: If given, [num_rows, num_qo_heads], float32, receives the log-sum-exp of the
                scores (natural log).

        Returns:
            The output, shaped as q.
        """
        check_attention_inputs(
            q, layer, kv_page_indices, pages=self.pages, num_qo_heads=self.num_qo_heads
        )
        check_tensor(
            "kv_page_indptr", kv_page_indptr, shape=(None,), dtype=torch.int32, device=q.device
        )
        if out is None:
            out = torch.empty_like(q)
        check_attention_outputs(out, lse, q, dtype=q.dtype)
        self._kernel.check(out, q)
        needs = self._needs
        if needs is None:
            raise PlanError("nothing is planned, plan must come before run")
        check_rows(q, needs.num_rows)
        check_entries("kv_page_indptr", kv_page_indptr, needs.num_borders)
        check_entries("kv_page_indices", kv_page_indices, needs.num_entries)
        if debug.is_on:
            check_scales(self._k_scale, self._v_scale, layer)
            self._check_page_table(kv_page_indptr, kv_page_indices)

        self._kernel.launch(out, lse, q, layer, kv_page_indptr, kv_page_indices)
        return out

    def _check_page_table(self, kv_page_indptr: Tensor, kv_page_indices: Tensor) -> None:
        """Check the page tables of requests with new tokens; waits for the device."""
        is_read = self._batch.qo_lens > 0
        kv_lens = self._batch.kv_lens[is_read]
        first_tokens = np.zeros_like(kv_lens)
        if self._sliding_window is not None:
            first_queries = kv_lens - self._batch.qo_lens[is_read]
            first_tokens = np.maximum(first_queries - self._sliding_window + 1, 0)
            # A tile of keys is read whole.
            first_tokens = first_tokens // self.tile.block_n * self.tile.block_n
        check_ragged_page_table(
            kv_page_indptr,
            kv_page_indices,
            requests=self._batch.requests[is_read],
            first_tokens=first_tokens,
            kv_lens=kv_lens,
            pages=self.pages,
        )
