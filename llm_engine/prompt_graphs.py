"""Passes of prompt tokens, replayed from CUDA graphs.

The host needs 15 to 40 ms to launch the kernels of 32 layers one by one, whatever their size. Up to
about a thousand tokens the device needs less, and would wait for the host; beyond that the host
would have hardly any time left for transfers. So these passes lie at fixed addresses, too, padded
to one of few sizes (docs/decisions/0010-steps-of-decode-are-recorded.md). Their logits and draws
are launched kernel by kernel, while the device computes the layers.

A step that decodes as well computes up to about a thousand rows in one pass (`decode_graphs`).

Legend: T tokens, padded or not, D hidden.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.plan import PrefillCapacity
from attn_kernels.tiles import PlanBuffer
from kv_cache.layout import num_pages_for
from llm_engine.attention_triton import TritonAttention
from llm_engine.forward_batch import ForwardBatch, HostBatch, build_host_batch
from llm_engine.limits import MAX_RECORDED_TOKENS
from llm_engine.recordings import Recordings, loading_kernels
from llm_engine.sampling import SequenceSlice
from llm_engine.transformer import Decoder

# Tokens of a recording. Up to 64 all take the same time, that of reading the weights once. Above,
# matrix tiles have 64 rows or more. The last size is that of a full step of a prefill worker.
NUM_TOKENS = (1, 4, 16, *range(64, 768, 64), *range(768, MAX_RECORDED_TOKENS + 1, 128))
# Of a recording that decodes as well: few tokens, as at the ends of cached prompts, or as many as
# make both together whole tiles of matrices.
FEW_TOKENS = (16, 64)
NUM_ROWS_OF_BOTH = tuple(range(128, 1025, 128))
MAX_SLICES = 256
MAX_PAGES = 1 << 16  # of all slices
NUM_TOKEN_FIELDS = 4  # id, position, page and slot of the append
NO_PAGE = -1  # append nowhere


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPrompts:
    """Prompt tokens on the device, for the pass of a step that decodes."""

    batch: ForwardBatch
    inputs: Tensor  # ids, positions, pages and slots of its tokens, padded, [4, T]
    prefill: PrefillAttention  # whose plans share the same launches

    @property
    def size(self) -> int:
        """Tokens, padded."""
        return self.inputs.shape[1]


class GraphedPrompts:
    """Computes slices by replaying recordings.

    Args:
        decoder: Computes the layers.
        attention: The attention of the decoder.
        page_size: The page size of the pool.
        device: The device of the pool.
        max_step_tokens: Most tokens of a step; larger recordings are of no use.

    Attributes:
        sizes: Numbers of tokens of the passes that compute prompts alone.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        *,
        page_size: int,
        device: torch.device,
        max_step_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._page_size = page_size
        self._max_step_tokens = max_step_tokens
        self.sizes = NUM_TOKENS[: bisect_left(NUM_TOKENS, max_step_tokens) + 1]
        max_tokens = max(self.sizes[-1], NUM_ROWS_OF_BOTH[-1])
        self._prefill = attention.prefill_of(
            PrefillCapacity(max_tokens=max_tokens, max_requests=MAX_SLICES)
        )
        # int64 fields of tokens, first page-table entries of slices, page table
        self._first_border = NUM_TOKEN_FIELDS * max_tokens * 2
        self._first_page = self._first_border + 2 * MAX_SLICES  # aligned
        self._buffer = PlanBuffer(self._first_page + MAX_PAGES, device)
        sent = self._buffer.device_buffer
        tokens = sent[: self._first_border].view(torch.int64)
        self._tokens = tokens.view(NUM_TOKEN_FIELDS, max_tokens)
        self._borders = sent[self._first_border : self._first_border + MAX_SLICES + 1]
        self._pages = sent[self._first_page :]
        self._recordings: Recordings[int, Tensor] = Recordings()
        self._unrecorded: list[int] = []  # sizes whose kernels are loaded

    def warm_up(self, max_tokens: int) -> None:
        """Load kernels of passes of all sizes, up to a sequence length; overwrites page 0."""
        self._unrecorded = list(self.sizes[: bisect_right(self.sizes, max_tokens)])
        with loading_kernels():
            for size in reversed(self._unrecorded):  # the others fit into the memory of the largest
                self.hidden_states(self._any_batch(size))

    def record_next(self) -> bool:
        """Record a pass that `warm_up` has loaded, and compute none; False: all are recorded."""
        while self._unrecorded:
            size = self._unrecorded.pop()  # the largest, likewise
            work = self._plan(self._any_batch(size), size)
            if self._recordings.record(size, work, num_rows=size):
                return True
        return False

    def sizes_behind(self, num_rows: int) -> tuple[int, ...]:
        """Return the numbers of prompt tokens that passes have behind this many decoding rows."""
        full = (each - num_rows for each in NUM_ROWS_OF_BOTH)
        sizes = (*FEW_TOKENS, *(each for each in full if each > FEW_TOKENS[-1]))
        return sizes[: bisect_left(sizes, self._max_step_tokens) + 1]

    def send_any_behind(self, num_rows: int, size: int) -> SentPrompts | None:
        """Send a batch of a size on page 0, as `send_behind` does."""
        return self.send_behind(num_rows, self._any_batch(size))

    def takes(self, batch: HostBatch) -> bool:
        """Return whether a batch has only prompt tokens, and few enough for a pass."""
        return self._fits(batch, self.sizes[-1])

    def _fits(self, batch: HostBatch, max_tokens: int) -> bool:
        return (
            batch.of_tokens.shape[1] <= max_tokens
            and batch.prompt_lens == batch.qo_lens
            and len(batch.qo_lens) <= MAX_SLICES
            and len(batch.page_table) <= MAX_PAGES
        )

    def hidden_states(self, batch: HostBatch) -> Tensor:
        """Compute a batch that `takes` accepts; return [T, D], valid until the next call."""
        num_tokens = batch.of_tokens.shape[1]
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        work = self._plan(batch, size)
        return self._recordings.run(size, work, num_rows=size)[:num_tokens]

    def send_behind(self, num_rows: int, batch: HostBatch) -> SentPrompts | None:
        """Send a batch; the result is valid until the next is sent.

        Returns:
            None if it has tokens that are not of prompts, or too many behind these rows.
        """
        sizes = self.sizes_behind(num_rows)
        if not self._fits(batch, sizes[-1]):
            return None
        size = sizes[bisect_left(sizes, batch.of_tokens.shape[1])]
        sent = self._send(batch, size)
        return SentPrompts(batch=sent, inputs=self._tokens[:, :size], prefill=self._prefill)

    def _plan(self, batch: HostBatch, size: int) -> Callable[[], Tensor]:
        """Send and plan a batch; return what computes it."""
        sent = self._send(batch, size)
        self._attention.plan_prompts(sent, self._prefill)
        return partial(self._decoder.run_layers, sent.token_ids_T)

    def _any_batch(self, size: int) -> HostBatch:
        prompt = SequenceSlice(
            token_ids=[0] * size,
            start=0,
            page_ids=[0] * num_pages_for(size, self._page_size),
            num_prompt_tokens=size,
        )
        return build_host_batch([prompt], self._page_size)

    def _send(self, batch: HostBatch, size: int) -> ForwardBatch:
        num_tokens, num_pages = batch.of_tokens.shape[1], len(batch.page_table)
        host = self._buffer.host()
        tokens = host[: self._first_border].view(np.int64).reshape(NUM_TOKEN_FIELDS, -1)
        tokens[:, :num_tokens] = batch.of_tokens
        tokens[:, num_tokens:size] = [[0], [0], [NO_PAGE], [0]]
        borders = batch.page_indptr
        host[self._first_border : self._first_border + len(borders)] = borders
        host[self._first_page : self._first_page + num_pages] = batch.page_table
        self._buffer.send(self._first_page + num_pages)
        return batch.on_device(self._tokens[:, :size], self._borders, self._pages)
