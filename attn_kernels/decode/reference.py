"""Reference of decode attention."""

from itertools import accumulate

import torch
from torch import Tensor

from attn_kernels.checks import Integers
from attn_kernels.prefill.reference import PrefillAttention, as_ints


class DecodeAttention:
    """Reference of `launch.DecodeAttention`: prefill of one token per request."""

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        max_requests: int,
        max_kv_tokens: int,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self._page_size = pages.shape[4]
        self._prefill = PrefillAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def plan(
        self,
        kv_lens: Integers,
        *,
        rows: Integers | None = None,
        table_starts: Integers | None = None,
    ) -> None:
        """Keep the batch."""
        counts = (-(-kv_len // self._page_size) for kv_len in as_ints(kv_lens))
        starts = accumulate(counts, initial=0) if table_starts is None else as_ints(table_starts)
        self._table_starts = torch.tensor(list(starts))
        self._prefill.plan([1] * len(kv_lens), kv_lens, first_rows=rows)

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer; write the planned rows of out, rounded to its dtype, and of lse."""
        return self._prefill.run(q, layer, self._table_starts, kv_page_indices, out=out, lse=lse)
