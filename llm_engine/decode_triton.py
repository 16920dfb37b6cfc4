"""Decode attention of drawn tokens on Triton kernels: which kernel, launches and buffers.

Rows that share pages read them once (cascade attention) where that changes no bit: a token must not
depend on other requests of its batch. Everywhere else each row reads its own pages (flat decode).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_kernels.cascade.launch import MAX_NARROW_ROWS, CascadeAttention
from attn_kernels.cascade.prefix_tree import within_window
from attn_kernels.decode.launch import DEFAULT_RULE, DecodeAttention
from attn_kernels.tiles import on_hopper
from kv_cache.layout import num_pages_for
from llm_engine.decode_rows import DecodeRows, IntArray
from llm_engine.kv_reads import KVReads

# Rows of a launch, and the sum of their keys, shared ones for each row. Buffers hold them from the
# start: recordings contain their addresses.
MAX_DECODE_ROWS = 1024
MAX_DECODE_TOKENS = 4 * 1024 * 1024

Attention = DecodeAttention | CascadeAttention


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordable:
    """What a recording of the launches of a plan holds for: all plans that agree in it."""

    has_few_rows: bool
    shares_prefixes: bool


def least_shared_len(page_size: int) -> int:
    """Return the least number of tokens that rows must have in common to share them."""
    return math.lcm(DEFAULT_RULE.split_len, page_size)


def few_rows(group: int) -> int:
    """Return for how many rows, at most, launches have buffers of their own.

    Cascade chooses narrow tiles for these. A power of two, as sizes of recordings are.

    Args:
        group: Query heads for each key-value head.
    """
    num_rows = max(MAX_NARROW_ROWS // group, 1)
    return 1 << (num_rows.bit_length() - 1)


def reads_prefixes_once(pages: Tensor, sliding_window: int | None) -> bool:
    """Return whether decode uses cascade attention for a pool.

    It is bit-identical to flat decode only in half precision with Hopper's instructions
    (docs/decisions/0007) or in Triton's interpreter. If a sliding window holds no more than the
    shortest shareable prefix, no two rows could share.
    """
    least_kv_len = least_shared_len(pages.shape[4]) + 1
    may_share = sliding_window is None or sliding_window >= least_kv_len
    has_bits = not pages.is_cuda or on_hopper(pages)
    return may_share and pages.element_size() <= 2 and has_bits


class TritonDecode:
    """Plans and launches decode attention for one pool."""

    def __init__(
        self, pages: Tensor, *, num_qo_heads: int, scale: float, sliding_window: int | None
    ) -> None:
        """Prepare for a pool; the arguments are those of `TritonAttention`."""
        self._pages = pages
        self._num_qo_heads = num_qo_heads
        self._scale = scale
        self._sliding_window = sliding_window
        self._few_rows = few_rows(num_qo_heads // pages.shape[3])
        num_pages, page_size = pages.shape[0], pages.shape[4]
        # One sequence may have them all, and its token is one launch at least.
        self._max_tokens = max(MAX_DECODE_TOKENS, num_pages * page_size)
        self._attentions = self._make_attentions()
        self._planned = self._attentions[-1]
        self._token_bytes = pages.stride(0) * pages.element_size() // pages.shape[4]

    def load_kernels(self) -> None:
        """Launch what reads shared prefixes; a pass without sharing launches none of it.

        Changes no page.
        """
        if not reads_prefixes_once(self._pages, self._sliding_window):
            return
        # Two requests share all they may; their pages may as well be one page.
        kv_len = least_shared_len(self._pages.shape[4]) + 1
        table = np.zeros(num_pages_for(kv_len, self._pages.shape[4]), dtype=np.int32)
        q = self._pages.new_zeros((2, self._num_qo_heads, self._pages.shape[5]))
        with self.sharing_all():
            for attention in self._attentions:
                assert isinstance(attention, CascadeAttention)
                attention.plan([kv_len] * 2, np.zeros(2, dtype=np.int64), table)
                assert attention.num_shared_items > 0, "the plan is flat"
                attention.run(q, 0, torch.from_numpy(table).to(self._pages.device))

    def plan(self, launch: DecodeRows, page_table: npt.NDArray[np.integer]) -> None:
        """Plan the rows of a launch; `page_table` is the flat one, on the host."""
        kv_lens, rows, table_starts = launch
        attention = self._attentions[0 if len(kv_lens) <= self._few_rows else -1]
        if isinstance(attention, CascadeAttention):
            attention.plan(kv_lens, table_starts, page_table, rows=rows)
        else:
            attention.plan(kv_lens, rows=rows, table_starts=table_starts)
        self._planned = attention

    def plan_next_step(self, kv_lens: IntArray) -> bool:
        """Plan the same rows again, each with the same pages and perhaps more, if possible.

        Shared prefixes stay the same. Returns whether it succeeded.
        """
        attention = self._planned
        fits = int(kv_lens.sum()) <= self._max_tokens
        if self._sliding_window is not None or not isinstance(attention, CascadeAttention):
            return False
        if fits:
            attention.plan_next_step(kv_lens)
        return fits

    @contextmanager
    def sharing_all(self) -> Iterator[None]:
        """Let plans share every common prefix, as if reading it again were expensive."""
        cascades = [each for each in self._attentions if isinstance(each, CascadeAttention)]
        models = [each.model for each in cascades]
        for each in cascades:
            each.model = each.model.sharing_all()
        try:
            yield
        finally:
            for each, model in zip(cascades, models, strict=True):
                each.model = model

    def recordable(self) -> Recordable:
        """Return what a recording of the last plan's launches is valid for."""
        planned = self._planned
        shares = isinstance(planned, CascadeAttention) and planned.num_shared_items > 0
        return Recordable(
            has_few_rows=planned is self._attentions[0],
            shares_prefixes=shares,
        )

    def reads(self, kv_lens: IntArray) -> KVReads:
        """Return what the last plan reads in all layers; takes the lengths of its rows."""
        visible, _ = within_window(kv_lens, self._sliding_window)
        needed_bytes = int(visible.sum()) * self._token_bytes
        if not isinstance(self._planned, CascadeAttention):
            return KVReads(needed_bytes=needed_bytes, read_bytes=needed_bytes)
        shared = self._planned.shared
        return KVReads(
            needed_bytes=needed_bytes,
            read_bytes=needed_bytes - shared.num_spared * self._token_bytes,
            groups=shared.num_groups,
            grouped_rows=shared.num_grouped,
        )

    def run(self, q_TNH: Tensor, layer: int, kv_page_indices: Tensor, *, out_TNH: Tensor) -> None:
        """Attend in one layer; writes the planned rows of the output."""
        self._planned.run(q_TNH, layer, kv_page_indices, out=out_TNH)

    def _make_attentions(self) -> tuple[Attention, ...]:
        """Return what takes launches of few rows, and what takes all others; may be the same."""
        if reads_prefixes_once(self._pages, self._sliding_window):
            of_any = self._make_cascade(MAX_DECODE_ROWS)
            return self._make_cascade(self._few_rows, memory_of=of_any), of_any
        flat = DecodeAttention(
            self._pages,
            num_qo_heads=self._num_qo_heads,
            scale=self._scale,
            max_requests=MAX_DECODE_ROWS,
            max_kv_tokens=self._max_tokens,
            sliding_window=self._sliding_window,
        )
        return (flat,)

    def _make_cascade(
        self, max_rows: int, memory_of: CascadeAttention | None = None
    ) -> CascadeAttention:
        return CascadeAttention(
            self._pages,
            num_qo_heads=self._num_qo_heads,
            scale=self._scale,
            max_requests=max_rows,
            max_kv_tokens=self._max_tokens,
            sliding_window=self._sliding_window,
            memory_of=memory_of,
        )
