"""Paged prefill attention: causal, ragged batch, each request a chunk over an existing prefix."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from attn_kernels import prefill_hopper
from attn_kernels.checks import (
    check_attention_inputs,
    check_attention_outputs,
    check_heads,
    check_kv_scales,
    check_mask,
    check_pages,
    check_tensor,
)
from attn_kernels.errors import ShapeError
from attn_kernels.prefill_hopper import HopperPrefill, HopperTile
from attn_kernels.prefill_plan import PrefillBatch
from attn_kernels.prefill_triton import PrefillTile, TritonPrefill, prefill_tile


class PrefillKernel(Protocol):
    """A kernel with its plan of a batch; arguments are those of `PrefillAttention`, checked."""

    def plan(self, batch: PrefillBatch) -> None: ...

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
    if soft_cap is None and prefill_hopper.is_for(pages):
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
        tile: PrefillTile | HopperTile | None = None,
    ) -> None:
        check_pages(pages)
        check_kv_scales(pages, k_scale, v_scale)
        _, _, _, num_kv_heads, _, head_dim = pages.shape
        group = check_heads(num_qo_heads, num_kv_heads, head_dim)
        check_mask(sliding_window, soft_cap)
        self.pages = pages
        self.num_qo_heads = num_qo_heads
        self.tile = tile or shipped_tile(pages, soft_cap)
        self._kernel: PrefillKernel
        if isinstance(self.tile, HopperTile):
            if soft_cap is not None:
                raise ShapeError(f"soft_cap is {soft_cap}, the Hopper kernel takes none")
            self._kernel = HopperPrefill(
                pages,
                group=group,
                scale=scale,
                sliding_window=sliding_window,
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
                tile=self.tile,
            )

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

        Raises:
            ShapeError: If a request has more new tokens than tokens, or fewer than none.
        """
        for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
            if not 0 <= qo_len <= kv_len:
                raise ShapeError(f"{qo_len} new tokens of {kv_len}, must be 0 to all of them")
        new = np.asarray(qo_lens, dtype=np.int64)
        packed_rows = np.cumsum(new) - new
        batch = PrefillBatch(
            requests=np.arange(len(new)) if requests is None else np.asarray(requests),
            first_rows=packed_rows if first_rows is None else np.asarray(first_rows),
            qo_lens=new,
            kv_lens=np.asarray(kv_lens, dtype=np.int64),
        )
        self._kernel.plan(batch)

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

        self._kernel.launch(out, lse, q, layer, kv_page_indptr, kv_page_indices)
        return out
