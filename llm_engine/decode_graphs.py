"""Decode steps as CUDA graphs: one call of the host from drawn tokens to drawn tokens.

A layer has about ten kernels, and launching them one by one from Python takes the host longer than
a decode step takes the device. State that changes from step to step lies at fixed addresses
(`attn_kernels.seats`), attention reads the rest from its plan, and rows are padded to one of few
sizes. Padding changes no bit, as no row depends on another
(docs/decisions/0006-the-same-bits-in-any-batch.md).

A step needs no token on the host: it reads the last tokens from the seats and leaves its own there.

Legend: R rows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_kernels.sampling.launch import Logprobs, TokenSampler
from attn_kernels.seats import bodies
from attn_kernels.tiles import to_device
from grammars.bits import TokenBits
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_rows import DecodeRows
from llm_engine.decode_triton import MIN_DECODE_ROWS, least_shared_len
from llm_engine.device_batch import DeviceBatch
from llm_engine.forward_batch import PassInputs
from llm_engine.recordings import CudaGraphRecorder, Recorder, Recordings
from llm_engine.transformer import Decoder

# Rows of a recording.
NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MAX_LOGPROBS = 20  # of the contract; each row gets as many if any row needs some
REPLAN_STEPS = 64  # steps of one batch between two searches for shared prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRows:
    """The results of a step, on the device; valid until the same decoder's next step begins."""

    tokens_R: Tensor  # int32; -1: nothing could be drawn
    logprobs: Logprobs | None  # of all rows, if one asked


@dataclass(frozen=True, slots=True)
class Kind:
    """What a recording holds for."""

    num_rows: int
    has_few_rows: bool  # for attention
    shares_prefixes: bool
    edits_logits: bool
    has_logprobs: bool
    has_masks: bool


class GraphedDecode:
    """Launches steps of a device batch."""

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        batch: DeviceBatch,
        sampler: TokenSampler,
        make_recorder: Callable[[], Recorder] = CudaGraphRecorder,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._make_recorder = make_recorder
        self._recordings: Recordings[Kind, DrawnRows] | None = None
        self._row_seats: tuple[int, ...] = ()  # of the last step
        self._num_padded = 0
        self._num_same = 0  # steps with these rows since the last search for shared prefixes

    def warm_up(self, *, page_size: int, max_tokens: int) -> None:
        """Record steps of all sizes that attention's first buffers can hold; overwrites page 0.

        Args:
            page_size: The page size of the pool.
            max_tokens: The longest sequence.
        """
        num_seats = len(self._batch.lengths)
        shared_len = least_shared_len(page_size) + 1
        for num_rows in NUM_ROWS[: bisect_right(NUM_ROWS, min(MIN_DECODE_ROWS, num_seats))]:
            self._record_rows(num_rows, 1)
            if shared_len <= max_tokens:
                with self._attention.sharing_all():
                    self._record_rows(num_rows, shared_len)

    def launch(
        self, seats: tuple[int, ...], *, has_new: bool, allowed: Mapping[int, TokenBits]
    ) -> DrawnRows:
        """Compute the last token of each seat's sequence and draw the next one.

        Args:
            seats: One for each row.
            has_new: Whether a seat may hold another sequence than in the last step.
            allowed: See EngineStep.
        """
        batch = self._batch
        index = np.array(seats, dtype=np.int64)
        if has_new or seats != self._row_seats:
            self._num_same = 0
        if seats != self._row_seats:
            self._set_rows(seats)
        self._plan(index)
        self._num_same += 1
        edits_logits = batch.edits_logits(index)
        has_logprobs = bool((batch.num_logprobs[index] >= 0).any())
        rows = [row for row, seat in enumerate(seats) if seat in allowed] if allowed else []
        if rows:
            bits = np.stack([allowed[seats[row]] for row in rows])
            batch.seats.set_masks(self._num_padded, rows, bits)
        drawn = self._run(edits_logits, has_logprobs, bool(rows))
        batch.lengths[index] += 1
        return drawn

    def _set_rows(self, seats: tuple[int, ...]) -> None:
        num_padded = NUM_ROWS[bisect_left(NUM_ROWS, len(seats))]
        rows = np.full(num_padded, -1, dtype=np.int32)
        rows[: len(seats)] = seats
        row_seats = self._batch.seats.row_seats
        row_seats[:num_padded].copy_(to_device(rows, row_seats.device))
        self._row_seats, self._num_padded = seats, num_padded

    def _plan(self, index: npt.NDArray[np.int64]) -> None:
        batch = self._batch
        page_table = batch.page_table.reshape(-1)
        rows = DecodeRows(
            kv_lens=batch.lengths[index],
            rows=np.arange(len(index)),
            table_starts=index * batch.page_table.shape[1],
        )
        is_next_step = 0 < self._num_same < REPLAN_STEPS
        if not is_next_step:
            self._num_same = 0
        seats, num_rows = batch.seats, self._num_padded
        inputs = PassInputs(
            token_ids_T=seats.token_ids[:num_rows],
            positions_T=seats.positions[:num_rows],
            append_page_T=seats.append_page[:num_rows],
            append_offset_T=seats.append_offset[:num_rows],
            kv_page_indices=seats.page_table.view(-1),
        )
        self._attention.plan_rows(inputs, rows, page_table, is_next_step=is_next_step)

    def _run(self, edits_logits: bool, has_logprobs: bool, has_masks: bool) -> DrawnRows:
        num_rows = self._num_padded

        def work() -> DrawnRows:
            return self._work(num_rows, edits_logits, has_logprobs, has_masks)

        launches = self._attention.recordable()
        if launches is None:
            return work()
        buffers = (launches.buffers, self._batch.seats.marks)
        if self._recordings is None or not self._recordings.hold_for(buffers):
            self._recordings = Recordings(buffers, self._make_recorder())
        kind = Kind(
            num_rows,
            launches.has_few_rows,
            launches.shares_prefixes,
            edits_logits,
            has_logprobs,
            has_masks,
        )
        return self._recordings.run(kind, work, num_rows=num_rows)

    def _work(
        self, num_rows: int, edits_logits: bool, has_logprobs: bool, has_masks: bool
    ) -> DrawnRows:
        seats = self._batch.seats
        params = seats.read(num_rows)
        logits = self._decoder.logits(self._decoder.run_layers(seats.token_ids[:num_rows]))
        edited = seats.edit(logits) if edits_logits else logits
        mask = seats.masks[:num_rows] if has_masks else None
        tokens = self._sampler.sample(edited, params, mask=mask)
        logprobs = None
        if has_logprobs:
            num_top = min(MAX_LOGPROBS, logits.shape[1])
            logprobs = self._sampler.logprobs(logits, tokens, num_top)
        seats.write(tokens)
        return DrawnRows(tokens_R=tokens, logprobs=logprobs)

    def _record_rows(self, num_rows: int, kv_len: int) -> None:
        """Run a kind of step often enough to record it, in free seats."""
        batch = self._batch
        seats = tuple(range(num_rows))
        for _ in range(2):  # launched, then recorded
            batch.lengths[:num_rows] = kv_len
            batch.seats.state[:num_rows, bodies.LENGTH.value] = kv_len
            self.launch(seats, has_new=True, allowed={})
        batch.lengths[:] = 0
        batch.seats.state.zero_()
