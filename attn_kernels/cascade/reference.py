"""Reference of cascade attention."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_kernels.checks import Integers
from attn_kernels.decode.reference import DecodeAttention


class CascadeAttention:
    """Reference of `launch.CascadeAttention`: decode, whatever is shared."""

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
        self._decode = DecodeAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=scale,
            max_requests=max_requests,
            max_kv_tokens=max_kv_tokens,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def plan(
        self,
        kv_lens: Integers,
        table_starts: npt.NDArray[np.integer],
        page_indices: npt.NDArray[np.integer],
        *,
        rows: Integers | None = None,
    ) -> None:
        """Keep the batch; its pages are read from what `run` is given."""
        self._decode.plan(kv_lens, rows=rows, table_starts=table_starts)
        self._rows, self._table_starts = rows, table_starts

    def plan_next_step(self, kv_lens: Integers) -> None:
        """Keep the batch with new lengths."""
        self._decode.plan(kv_lens, rows=self._rows, table_starts=self._table_starts)

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
        return self._decode.run(q, layer, kv_page_indices, out=out, lse=lse)
