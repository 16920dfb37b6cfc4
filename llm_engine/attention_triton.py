"""Attention back end on Triton kernels: CUDA devices, or Triton's interpreter in tests.

Prompt tokens run in the prefill kernel, even in a chunk of one token. Drawn tokens run in the
decode kernel, even many of one sequence, each as a separate row; pages that several rows share are
read once for all of them. So a position has the same bits in any batch and chunk, and when a
sequence resumes elsewhere from its prompt and drawn tokens.
"""

from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.plan import PrefillCapacity
from llm_engine.decode_rows import DecodeRows, decode_launches, decode_rows
from llm_engine.decode_triton import (
    MAX_DECODE_ROWS,
    MAX_DECODE_TOKENS,
    Recordable,
    TritonDecode,
)
from llm_engine.forward_batch import ForwardBatch, PassInputs
from llm_engine.kv_reads import NO_READS, KVReads


class TritonAttention:
    """Implements `llm_engine.attention.AttentionBackend` for one pool and one rotary table."""

    def __init__(
        self,
        pages: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """Prepare for a pool.

        Args:
            pages: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim], contiguous.
            cos: [max_positions, head_dim / 2], float32.
            sin: Likewise.
            num_qo_heads: Query heads of the model.
            scale: Factor of the scores.
            sliding_window: Number of last tokens that a query sees; None: all.
        """
        self._pages = pages
        self._cos = cos
        self._sin = sin
        self._num_qo_heads = num_qo_heads
        self._scale = scale
        self._sliding_window = sliding_window
        self._prefill = self.prefill_of(None)
        self._decode = TritonDecode(
            pages, num_qo_heads=num_qo_heads, scale=scale, sliding_window=sliding_window
        )
        self._batch: PassInputs | None = None
        self._planned_prefill: PrefillAttention | None = None  # None: no prompt tokens
        self._prompt_tables: tuple[Tensor, Tensor]  # of planned prompt tokens: borders, entries
        self._has_rows_planned = False  # the last plan was made by plan_rows
        self._decode_launches: list[DecodeRows] = []
        self._page_table: npt.NDArray[np.integer] = np.zeros(0, dtype=np.int64)
        self._reads = NO_READS

    def load_kernels(self) -> None:
        """Launch kernels that a warm-up pass does not reach; on a GPU, in its device's context."""
        self._decode.load_kernels()

    def plan(self, batch: ForwardBatch) -> None:
        """Plan each kernel for its tokens of the batch."""
        self._batch = batch
        self._has_rows_planned = False
        self._plan_prefill(batch, self._prefill)
        self._plan_decode(decode_rows(batch), batch.page_table)

    def prefill_of(self, capacity: PrefillCapacity | None) -> PrefillAttention:
        """Return a prefill; if it has a capacity, all its plans share the same launches."""
        return PrefillAttention(
            self._pages,
            num_qo_heads=self._num_qo_heads,
            scale=self._scale,
            sliding_window=self._sliding_window,
            capacity=capacity,
        )

    def plan_prompts(self, batch: ForwardBatch, prefill: PrefillAttention) -> None:
        """Plan a pass of only prompt tokens for a result of `prefill_of`.

        A recording of its launches holds for any other such pass over the same tensors.
        """
        self._batch = batch
        self._has_rows_planned = False
        self._decode_launches = []
        self._plan_prefill(batch, prefill)

    def plan_rows(
        self,
        inputs: PassInputs,
        rows: DecodeRows,
        page_table: npt.NDArray[np.integer],
        *,
        is_next_step: bool,
    ) -> None:
        """Plan a pass of drawn tokens, one of each sequence.

        Args:
            inputs: The inputs of the pass, on the device.
            rows: Its tokens.
            page_table: The flat one, on the host.
            is_next_step: Whether the last call had the same rows over the same table, and each
                sequence keeps its pages and may have more.
        """
        is_next_step &= self._has_rows_planned and len(self._decode_launches) == 1
        self._batch = inputs
        self._planned_prefill = None
        self._has_rows_planned = True
        if is_next_step and self._decode.plan_next_step(rows.kv_lens):
            self._reads += self._decode.reads(rows.kv_lens)
        else:
            self._plan_decode(rows, page_table)

    def plan_prompts_behind(
        self, batch: ForwardBatch, prefill: PrefillAttention, *, first_row: int
    ) -> None:
        """Add prompt tokens to the pass of the last `plan_rows`, whose inputs include them.

        Args:
            batch: Only prompt tokens.
            prefill: A result of `prefill_of`.
            first_row: Row of the first of them in the pass.
        """
        self._plan_prefill(batch, prefill, first_row=first_row)

    def take_reads(self) -> KVReads:
        """Return what passes of drawn tokens have read since the last call."""
        reads, self._reads = self._reads, NO_READS
        return reads

    def sharing_all(self) -> AbstractContextManager[None]:
        """Let plans share every common prefix of drawn tokens, even where it does not pay off."""
        return self._decode.sharing_all()

    def recordable(self) -> Recordable | None:
        """Return what a recording of the last plan's launches is valid for; None: that plan only.

        Plans whose batches have other tensors or another number of tokens never agree.
        """
        if not self._has_rows_planned or len(self._decode_launches) != 1:
            return None
        return self._decode.recordable()

    def rotate_and_append(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Rotate q and k by position, write k and v to the pages, return the rotated q."""
        batch = self._planned()
        return rotate_and_append(
            q_TNH,
            k_TKH,
            v_TKH,
            self._pages,
            layer,
            cos=self._cos,
            sin=self._sin,
            positions=batch.positions_T,
            append_page=batch.append_page_T,
            append_offset=batch.append_offset_T,
        )

    def attend(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Causal attention of the rotated queries over their sequences' pages, [T, N, H]."""
        batch = self._planned()
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        if self._planned_prefill is not None:
            self._planned_prefill.run(q_TNH, layer, *self._prompt_tables, out=out_TNH)
        for index, launch in enumerate(self._decode_launches):
            if len(self._decode_launches) > 1:  # otherwise the pass's plan serves all layers
                self._decode.plan(launch, self._page_table)
                if layer == 0 and index > 0:  # the first one was counted with the pass
                    self._reads += self._decode.reads(launch.kv_lens)
            self._decode.run(q_TNH, layer, batch.kv_page_indices, out_TNH=out_TNH)
        return out_TNH

    def _plan_decode(self, rows: DecodeRows, page_table: npt.NDArray[np.integer]) -> None:
        self._page_table = page_table
        self._decode_launches = decode_launches(
            rows, max_rows=MAX_DECODE_ROWS, max_tokens=MAX_DECODE_TOKENS
        )
        if self._decode_launches:
            self._decode.plan(self._decode_launches[0], page_table)
            self._reads += self._decode.reads(self._decode_launches[0].kv_lens)

    def _plan_prefill(
        self, batch: ForwardBatch, prefill: PrefillAttention, *, first_row: int = 0
    ) -> None:
        lens = zip(batch.qo_lens, batch.kv_lens, batch.prompt_lens, strict=True)
        chunks = []
        for index, (qo_len, kv_len, prompt_len) in enumerate(lens):
            if prompt_len:
                chunks.append((prompt_len, kv_len - qo_len + prompt_len, first_row, index))
            first_row += qo_len
        self._planned_prefill = prefill if chunks else None
        self._prompt_tables = (batch.kv_page_indptr, batch.kv_page_indices)
        if chunks:
            prompt_lens, prompt_ends, first_rows, slices = zip(*chunks, strict=True)
            prefill.plan(prompt_lens, prompt_ends, first_rows=first_rows, requests=slices)

    def _planned(self) -> PassInputs:
        assert self._batch is not None, "plan comes first"
        return self._batch
