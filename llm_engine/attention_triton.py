"""Attention back end on Triton kernels: CUDA devices, or Triton's interpreter in tests.

Prompt tokens run in the prefill kernel, also a chunk of a single one; drawn tokens run in the
decode kernel, also many of one sequence, each as a row of its own. So a position has the same bits
in any batch and chunk, and when a sequence is resumed elsewhere from its prompt and drawn tokens.
"""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from attn_kernels.append import rotate_and_append
from attn_kernels.decode import DecodeAttention
from attn_kernels.prefill import PrefillAttention
from kv_cache.layout import num_pages_for
from llm_engine.forward_batch import ForwardBatch

# Keys of a launch of the decode kernel, summed over rows: what small batches need, and a bound for
# resumptions, whose rows are many; buffers grow with it.
MIN_DECODE_ROWS = 64
MIN_DECODE_TOKENS = 64 * 1024
MAX_DECODE_TOKENS = 4 * 1024 * 1024
MAX_SPARE_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """A drawn token as the decode kernel sees it."""

    kv_len: int  # tokens that it attends to, itself included
    row: int  # in the queries
    slice_index: int  # in the page table


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
            sliding_window: Number of last tokens that a query sees; None is all.
        """
        self._pages = pages
        self._cos = cos
        self._sin = sin
        self._num_qo_heads = num_qo_heads
        self._scale = scale
        self._sliding_window = sliding_window
        self._prefill = PrefillAttention(
            pages, num_qo_heads=num_qo_heads, scale=scale, sliding_window=sliding_window
        )
        self._decode = self._decode_for(MIN_DECODE_ROWS, MIN_DECODE_TOKENS)
        self._batch: ForwardBatch | None = None
        self._has_prefill = False
        self._decode_launches: list[list[DecodeRow]] = []

    def plan(self, batch: ForwardBatch) -> None:
        """Plan both kernels for their tokens of the batch."""
        self._batch = batch
        self._plan_prefill(batch)
        self._decode_launches = decode_launches(batch, MAX_DECODE_TOKENS)
        if self._decode_launches:
            self._plan_decode(batch, self._decode_launches[0])

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
        if self._has_prefill:
            tables = (batch.kv_page_indptr, batch.kv_page_indices)
            self._prefill.run(q_TNH, layer, *tables, out=out_TNH)
        for launch in self._decode_launches:
            if len(self._decode_launches) > 1:  # else the plan of the pass holds for all layers
                self._plan_decode(batch, launch)
            self._decode.run(q_TNH, layer, batch.kv_page_indices, out=out_TNH)
        return out_TNH

    def _plan_prefill(self, batch: ForwardBatch) -> None:
        lens = zip(batch.qo_lens, batch.kv_lens, batch.prompt_lens, strict=True)
        chunks = []
        first_row = 0
        for index, (qo_len, kv_len, prompt_len) in enumerate(lens):
            if prompt_len:
                chunks.append((prompt_len, kv_len - qo_len + prompt_len, first_row, index))
            first_row += qo_len
        self._has_prefill = bool(chunks)
        if chunks:
            prompt_lens, prompt_ends, first_rows, slices = zip(*chunks, strict=True)
            self._prefill.plan(prompt_lens, prompt_ends, first_rows=first_rows, requests=slices)

    def _plan_decode(self, batch: ForwardBatch, launch: list[DecodeRow]) -> None:
        kv_lens = [each.kv_len for each in launch]
        decode = self._decode
        if len(launch) > decode.max_requests or sum(kv_lens) > decode.max_kv_tokens:
            # Doubled, so that a growing batch makes few new buffers; within reason.
            spare_rows = min(len(launch), MAX_SPARE_ROWS)
            spare_tokens = min(sum(kv_lens), MAX_DECODE_TOKENS - sum(kv_lens))
            self._decode = self._decode_for(
                max(len(launch) + spare_rows, decode.max_requests),
                max(sum(kv_lens) + max(spare_tokens, 0), decode.max_kv_tokens),
            )
        table_lens = [num_pages_for(kv_len, self._pages.shape[4]) for kv_len in batch.kv_lens]
        table_starts = list(accumulate(table_lens, initial=0))
        self._decode.plan(
            kv_lens,
            rows=[each.row for each in launch],
            table_starts=[table_starts[each.slice_index] for each in launch],
        )

    def _planned(self) -> ForwardBatch:
        assert self._batch is not None, "plan comes first"
        return self._batch

    def _decode_for(self, max_rows: int, max_tokens: int) -> DecodeAttention:
        return DecodeAttention(
            self._pages,
            num_qo_heads=self._num_qo_heads,
            scale=self._scale,
            max_requests=max_rows,
            max_kv_tokens=max_tokens,
            sliding_window=self._sliding_window,
        )


def decode_launches(batch: ForwardBatch, max_tokens: int) -> list[list[DecodeRow]]:
    """Return the drawn tokens of a batch, cut into launches of `max_tokens` keys or one row."""
    launches: list[list[DecodeRow]] = []
    num_tokens = 0
    end_row = 0
    lens = zip(batch.qo_lens, batch.kv_lens, batch.prompt_lens, strict=True)
    for index, (qo_len, kv_len, prompt_len) in enumerate(lens):
        end_row += qo_len
        for tokens_behind in reversed(range(qo_len - prompt_len)):
            row = DecodeRow(
                kv_len=kv_len - tokens_behind, row=end_row - 1 - tokens_behind, slice_index=index
            )
            if not launches or num_tokens + row.kv_len > max_tokens:
                launches.append([])
                num_tokens = 0
            launches[-1].append(row)
            num_tokens += row.kv_len
    return launches
