"""Passes without prompt tokens, launched as CUDA graphs: one call of the host for all layers.

A layer has some ten kernels, and launching them one by one from Python takes the host longer than
a step of decode takes the device. A graph repeats launches with the arguments they were recorded
with. So what changes from pass to pass is brought to fixed addresses, attention reads the rest from
its plan, and rows are padded to one of few sizes. Padding shows in no bit, as no row depends on
another (docs/decisions/0006-the-same-bits-in-any-batch.md).

Legend: T tokens of all slices, D hidden.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kv_cache.layout import num_pages_for
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_triton import MAX_DECODE_TOKENS, MIN_DECODE_ROWS, least_shared_len
from llm_engine.forward_batch import ForwardBatch, build_forward_batch
from llm_engine.model_config import ModelConfig
from llm_engine.operations import Operations
from llm_engine.sampling import SequenceSlice
from llm_engine.transformer import Decoder
from llm_engine.weights import DecoderWeights
from observability.logs import fields

logger = logging.getLogger(__name__)

Work = Callable[[], Tensor]
Recorder = Callable[[Work], Work]
Kind = tuple[int, bool, bool]  # rows, whether they are few, whether prefixes are read once

# Rows of a recording; larger passes keep the device busy while the host launches the next kernel.
NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MIN_TABLE_ENTRIES = MAX_DECODE_TOKENS // 16  # a launch in pages of 16 tokens


class CudaGraphRecorder:
    """Records what a function launches on the current device.

    Recordings of one recorder share the memory they work in: they run one after the other, and the
    result of one is valid until the next one runs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        """Return what repeats the launches of `work`, whose kernels must have run before."""
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph: it waits for the whole device, also for a transfer that waits
        # for its peer. And what may not be recorded, other threads may do meanwhile.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()

        def repeat() -> Tensor:
            graph.replay()
            return result

        return repeat


class GraphedDecoder(Decoder):
    """A decoder that records its passes without prompt tokens and repeats the recordings.

    The first pass of a kind is launched kernel by kernel, which loads them; the second one is
    recorded. A result of `hidden_states` is valid until the next call.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        attention: TritonAttention,
        operations: Operations,
        make_recorder: Callable[[], Recorder] = CudaGraphRecorder,
    ) -> None:
        super().__init__(config, weights, attention, operations)
        self._attention: TritonAttention = attention
        self._make_recorder = make_recorder
        self._inputs = _Inputs(MIN_TABLE_ENTRIES, weights.embedding.device)
        self._recordings: _Recordings | None = None

    def warm_up(self, *, page_size: int, max_tokens: int) -> None:
        """Record passes of all sizes that the first buffers of attention hold."""
        for num_rows in NUM_ROWS[: bisect_right(NUM_ROWS, MIN_DECODE_ROWS)]:
            self._record_rows(num_rows, 1, page_size)
            kv_len = least_shared_len(page_size) + 1
            if kv_len <= max_tokens:
                with self._attention.sharing_all():
                    self._record_rows(num_rows, kv_len, page_size)

    def hidden_states(self, batch: ForwardBatch) -> Tensor:
        """Compute all tokens of a batch, append their K and V to the pages; return [T, D]."""
        num_rows = len(batch.token_ids_T)
        if any(batch.prompt_lens) or num_rows > NUM_ROWS[-1]:
            return super().hidden_states(batch)
        num_entries = len(batch.kv_page_indices)
        if num_entries > len(self._inputs.kv_page_indices):
            self._inputs = _Inputs(2 * num_entries, batch.kv_page_indices.device)
            self._recordings = None
        inputs = self._inputs.filled(batch, NUM_ROWS[bisect_left(NUM_ROWS, num_rows)])
        self._attention.plan(inputs)
        return self._run(inputs.token_ids_T)[:num_rows]

    def _record_rows(self, num_rows: int, kv_len: int, page_size: int) -> None:
        page_ids = [0] * num_pages_for(kv_len, page_size)
        row = SequenceSlice(token_ids=[0], start=kv_len - 1, page_ids=page_ids, num_prompt_tokens=0)
        device = self._inputs.token_ids_T.device
        batch = build_forward_batch([row] * num_rows, page_size, device)
        for _ in range(2):  # launched, then recorded
            self.hidden_states(batch)

    def _run(self, token_ids_T: Tensor) -> Tensor:
        work = partial(self._run_layers, token_ids_T)
        launches = self._attention.recordable()
        if launches is None:
            return work()
        if self._recordings is None or self._recordings.buffers is not launches.buffers:
            self._recordings = _Recordings(launches.buffers, self._make_recorder())
        kind = (len(token_ids_T), launches.has_few_rows, launches.shares_prefixes)
        return self._recordings.run(kind, work)


class _Recordings:
    """Recordings of passes by kind, as long as what they have the addresses of remains."""

    def __init__(self, buffers: object, record: Recorder) -> None:
        self.buffers = buffers
        self._record = record
        self._repeats: dict[Kind, Work | None] = {}  # None: launched once

    def run(self, kind: Kind, work: Work) -> Tensor:
        if kind not in self._repeats:
            result = work()
            self._repeats[kind] = None
            return result
        repeat = self._repeats[kind]
        if repeat is None:
            try:
                repeat = self._record(work)
            except torch.OutOfMemoryError:  # slower, but nobody's request fails
                logger.warning("pass_not_recorded", extra=fields(rows=kind[0]))
                repeat = work
            self._repeats[kind] = repeat
        return repeat()


class _Inputs:
    """What differs from pass to pass, at fixed addresses."""

    def __init__(self, max_entries: int, device: torch.device) -> None:
        max_rows = NUM_ROWS[-1]
        self.token_ids_T = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros_like(self.token_ids_T)
        self.append_page_T = torch.zeros_like(self.token_ids_T)
        self.append_offset_T = torch.zeros_like(self.token_ids_T)
        self.kv_page_indices = torch.zeros(max_entries, dtype=torch.int32, device=device)

    def filled(self, batch: ForwardBatch, num_padded: int) -> ForwardBatch:
        """Return the batch over these tensors, with rows that are computed and written nowhere."""
        num_rows = len(batch.token_ids_T)
        self.token_ids_T[:num_rows] = batch.token_ids_T
        self.positions_T[:num_rows] = batch.positions_T
        self.append_page_T[:num_rows] = batch.append_page_T
        self.append_page_T[num_rows:num_padded] = -1
        self.append_offset_T[:num_rows] = batch.append_offset_T
        self.kv_page_indices[: len(batch.kv_page_indices)] = batch.kv_page_indices
        return replace(
            batch,
            token_ids_T=self.token_ids_T[:num_padded],
            positions_T=self.positions_T[:num_padded],
            append_page_T=self.append_page_T[:num_padded],
            append_offset_T=self.append_offset_T[:num_padded],
            kv_page_indices=self.kv_page_indices,
        )
