"""Decode steps as CUDA graphs: one call of the host from drawn tokens to drawn tokens.

A layer has about ten kernels, and launching them one by one from Python takes the host longer than
a decode step takes the device. State that changes from step to step lies at fixed addresses
(`attn_kernels.seats`), attention reads the rest from its plan, and rows are padded to one of few
sizes. Padding changes no bit, as no row depends on another
(docs/decisions/0006-the-same-bits-in-any-batch.md).

A step needs no token on the host: it reads the last tokens from the seats and leaves its own there.

A step may compute a few prompt tokens in the same pass, in rows behind those of the seats. Their
layers cost almost nothing there, since the weights are read once for both.

Legend: R rows of the seats, T tokens of prompts, D hidden.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import Logprobs
from attn_kernels.seats import bodies
from attn_kernels.tiles import to_device
from grammars.bits import TokenBits
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_rows import DecodeRows
from llm_engine.decode_triton import MIN_DECODE_ROWS, least_shared_len
from llm_engine.device_batch import DeviceBatch
from llm_engine.forward_batch import PassInputs
from llm_engine.limits import MAX_LOGPROBS
from llm_engine.prompt_graphs import NUM_TOKENS_BESIDE, GraphedPrompts, SentPrompts
from llm_engine.recordings import Recordings, run_until_recorded
from llm_engine.transformer import Decoder

# Rows of a recording. With prompt tokens there are fewer sizes: each comes with several of those.
NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NUM_ROWS_BESIDE = (16, 32, 64, 128, 256)
REPLAN_STEPS = 64  # steps of one batch between two searches for shared prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnRows:
    """The results of a step, on the device; valid until the same decoder's next step begins."""

    tokens_R: Tensor  # int32; -1: nothing could be drawn
    logprobs: Logprobs | None  # of all rows, if one asked
    hidden_TD: Tensor  # of the prompt tokens, padded


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawKind:
    """What becomes of the logits of a step."""

    edits_logits: bool
    has_logprobs: bool
    has_masks: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What a recording holds for."""

    num_rows: int
    num_prompt_tokens: int
    has_few_rows: bool  # for attention
    shares_prefixes: bool
    draws: DrawKind


class GraphedDecode:
    """Launches steps of a device batch."""

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        batch: DeviceBatch,
        sampler: TokenSampler,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._recordings: Recordings[Kind, DrawnRows] | None = None
        # ids, positions, pages and slots of a step that has prompt tokens
        num_inputs = NUM_ROWS_BESIDE[-1] + NUM_TOKENS_BESIDE[-1]
        self._inputs = batch.seats.inputs.new_zeros((len(batch.seats.inputs), num_inputs))
        self._row_seats: tuple[int, ...] = ()  # of the last step
        self._num_same = 0  # steps with these rows since the last search for shared prefixes

    def warm_up(
        self, *, page_size: int, max_tokens: int, prompts: GraphedPrompts | None = None
    ) -> None:
        """Record steps of all sizes that attention's first buffers can hold; overwrites page 0.

        Args:
            page_size: The page size of the pool.
            max_tokens: The longest sequence.
            prompts: If given, steps with its prompt tokens are recorded, too.
        """
        num_seats = len(self._batch.lengths)
        shared_len = least_shared_len(page_size) + 1
        kv_lens = [each for each in (1, shared_len) if each <= max_tokens]
        for kv_len in kv_lens:
            with self._attention.sharing_all():
                for num_rows in NUM_ROWS[: bisect_right(NUM_ROWS, min(MIN_DECODE_ROWS, num_seats))]:
                    self._record_rows(num_rows, kv_len)
                for sent in prompts.any_beside(max_tokens) if prompts else ():
                    for num_rows in NUM_ROWS_BESIDE[: bisect_right(NUM_ROWS_BESIDE, num_seats)]:
                        self._record_rows(num_rows, kv_len, sent)
        self._load_draws()

    def launch(
        self,
        seats: tuple[int, ...],
        *,
        has_new: bool,
        allowed: Mapping[int, TokenBits],
        prompts: SentPrompts | None = None,
    ) -> DrawnRows:
        """Compute the last token of each seat's sequence and draw the next one.

        Args:
            seats: One for each row; with prompt tokens at most NUM_ROWS_BESIDE[-1].
            has_new: Whether a seat may hold another sequence than in the last step.
            allowed: See EngineStep.
            prompts: To be computed in the same pass.
        """
        batch = self._batch
        sizes = NUM_ROWS if prompts is None else NUM_ROWS_BESIDE
        num_rows = min(sizes[bisect_left(sizes, len(seats))], batch.seats.max_rows)
        index = np.array(seats, dtype=np.int64)
        if has_new or seats != self._row_seats:
            self._num_same = 0
        if seats != self._row_seats:
            self._set_rows(seats)
        self._plan(index, num_rows, prompts)
        self._num_same += 1
        rows = [row for row, seat in enumerate(seats) if seat in allowed] if allowed else []
        if rows:
            bits = np.stack([allowed[seats[row]] for row in rows])
            batch.seats.set_masks(num_rows, rows, bits)
        draws = DrawKind(
            edits_logits=batch.edits_logits(index),
            has_logprobs=bool((batch.num_logprobs[index] >= 0).any()),
            has_masks=bool(rows),
        )
        drawn = self._run(num_rows, prompts, draws)
        batch.lengths[index] += 1
        return drawn

    def _set_rows(self, seats: tuple[int, ...]) -> None:
        row_seats = self._batch.seats.row_seats
        rows = np.full(len(row_seats), -1, dtype=np.int32)
        rows[: len(seats)] = seats
        row_seats.copy_(to_device(rows, row_seats.device))
        self._row_seats = seats

    def _plan(
        self, index: npt.NDArray[np.int64], num_rows: int, prompts: SentPrompts | None
    ) -> None:
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
        token_ids, positions, append_page, append_offset = self._inputs_of(num_rows, prompts)
        inputs = PassInputs(
            token_ids_T=token_ids,
            positions_T=positions,
            append_page_T=append_page,
            append_offset_T=append_offset,
            kv_page_indices=batch.seats.page_table.view(-1),
        )
        self._attention.plan_rows(inputs, rows, page_table, is_next_step=is_next_step)
        if prompts is not None:
            self._attention.plan_prompts_behind(prompts.batch, prompts.prefill, first_row=num_rows)

    def _inputs_of(self, num_rows: int, prompts: SentPrompts | None) -> Tensor:
        """Return where a pass finds ids, positions, pages and slots of its tokens, [4, R + T]."""
        if prompts is None:
            return self._batch.seats.inputs[:, :num_rows]
        return self._inputs[:, : num_rows + prompts.size]

    def _run(self, num_rows: int, prompts: SentPrompts | None, draws: DrawKind) -> DrawnRows:
        def work() -> DrawnRows:
            return self._work(num_rows, prompts, draws)

        launches = self._attention.recordable()
        if launches is None:
            return work()
        buffers = (launches.buffers, self._batch.seats.marks)
        if self._recordings is None or not self._recordings.hold_for(buffers):
            self._recordings = Recordings(buffers)
        kind = Kind(
            num_rows=num_rows,
            num_prompt_tokens=prompts.size if prompts else 0,
            has_few_rows=launches.has_few_rows,
            shares_prefixes=launches.shares_prefixes,
            draws=draws,
        )
        return self._recordings.run(kind, work, num_rows=num_rows)

    def _work(self, num_rows: int, prompts: SentPrompts | None, draws: DrawKind) -> DrawnRows:
        seats = self._batch.seats
        params = seats.read(num_rows)
        inputs = self._inputs_of(num_rows, prompts)
        if prompts is not None:
            inputs[:, :num_rows].copy_(seats.inputs[:, :num_rows])
            inputs[:, num_rows:].copy_(prompts.inputs)
        hidden = self._decoder.run_layers(inputs[0])
        logits = self._decoder.logits(hidden[:num_rows])
        edited = seats.edit(logits) if draws.edits_logits else logits
        mask = seats.masks[:num_rows] if draws.has_masks else None
        tokens = self._sampler.sample(edited, params, mask=mask)
        logprobs = None
        if draws.has_logprobs:
            num_top = min(MAX_LOGPROBS, logits.shape[1])
            logprobs = self._sampler.logprobs(logits, tokens, num_top)
        seats.write(tokens)
        return DrawnRows(tokens_R=tokens, logprobs=logprobs, hidden_TD=hidden[num_rows:])

    def _load_draws(self) -> None:
        """Launch the kernels of all draws, of which most are recorded only when a request comes."""
        with self._any_rows(1, kv_len=1):
            self._num_same = 0
            self._set_rows((0,))
            self._plan(np.arange(1), 1, None)
            for edits_logits, has_masks in product((False, True), repeat=2):
                draws = DrawKind(edits_logits=edits_logits, has_logprobs=True, has_masks=has_masks)
                self._work(1, None, draws)

    def _record_rows(self, num_rows: int, kv_len: int, prompts: SentPrompts | None = None) -> None:
        """Record a kind of step, in free seats."""

        def run() -> None:
            with self._any_rows(num_rows, kv_len):
                self.launch(tuple(range(num_rows)), has_new=True, allowed={}, prompts=prompts)

        run_until_recorded(run)

    @contextmanager
    def _any_rows(self, num_rows: int, kv_len: int) -> Iterator[None]:
        """While entered, the first seats have sequences of a length, on page 0."""
        batch = self._batch
        batch.lengths[:num_rows] = kv_len
        batch.seats.state[:num_rows, bodies.LENGTH.value] = kv_len
        try:
            yield
        finally:
            batch.lengths[:] = 0
            batch.seats.state.zero_()
