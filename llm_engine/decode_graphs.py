"""Decode steps as CUDA graphs: one call of the host from drawn tokens to drawn tokens.

A layer has about ten kernels, and launching them one by one from Python takes the host longer than
a decode step takes the device. State that changes from step to step lies at fixed addresses
(`attn_kernels.seats`), attention reads the rest from its plan, and rows are padded to one of few
sizes. Padding changes no bit, as no row depends on another
(docs/decisions/0006-the-same-bits-in-any-batch.md).

A step needs no token on the host: it reads the last tokens from the seats and leaves its own there.

A step may compute prompt tokens in the same pass, in rows behind those of the seats: the weights
are read once for both, and both together fill the tiles of products.

Legend: R rows of the seats, T tokens of prompts, D hidden.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import Logprobs
from attn_kernels.tiles import to_device
from grammars.bits import TokenBits
from kv_cache.layout import num_pages_for
from llm_engine.attention_triton import TritonAttention
from llm_engine.decode_rows import DecodeRows
from llm_engine.decode_triton import Recordable, least_shared_len
from llm_engine.device_batch import DeviceBatch
from llm_engine.forward_batch import PassInputs
from llm_engine.limits import MAX_LOGPROBS
from llm_engine.prompt_graphs import GraphedPrompts, SentPrompts
from llm_engine.recordings import Recordings, loading_kernels
from llm_engine.transformer import Decoder

# Rows of a recording. Fewer sizes have prompt tokens: each is recorded with many numbers of them.
NUM_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NUM_ROWS_BESIDE = (16, 32, 64, 128, 192, 256)
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
    launches: Recordable  # of attention
    draws: DrawKind


PLAIN = DrawKind(edits_logits=False, has_logprobs=False, has_masks=False)


class GraphedDecode:
    """Launches steps of a device batch.

    Args:
        decoder: Computes the layers.
        attention: The attention of the decoder.
        batch: The seats.
        sampler: Draws.
        prompts: Sends prompt tokens that steps compute in the same pass; None: there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: TritonAttention,
        batch: DeviceBatch,
        sampler: TokenSampler,
        prompts: GraphedPrompts | None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._sampler = sampler
        self._prompts = prompts
        self._recordings: Recordings[Kind, DrawnRows] = Recordings()
        # Rows, prompt tokens and lengths of steps whose kernels `warm_up` has loaded
        self._unrecorded: deque[tuple[int, int, int]] = deque()
        self._beside = {  # rows of a step with prompt tokens |-> numbers of these
            rows: prompts.sizes_behind(rows)
            for rows in sorted({min(each, batch.seats.max_rows) for each in NUM_ROWS_BESIDE})
            if prompts is not None
        }
        # ids, positions, pages and slots of such a step
        num_inputs = max((rows + sizes[-1] for rows, sizes in self._beside.items()), default=0)
        self._inputs = batch.seats.inputs.new_zeros((len(batch.seats.inputs), num_inputs))
        self._row_seats: tuple[int, ...] = ()  # of the last step
        self._num_same = 0  # steps with these rows since the last search for shared prefixes

    def warm_up(self, *, max_tokens: int) -> None:
        """Load kernels of steps of all sizes.

        No seat may be taken; none changes.

        Args:
            max_tokens: The longest sequence.
        """
        shared_len = least_shared_len(self._batch.seats.page_size) + 1
        most = self._batch.seats.max_rows
        alone = {min(each, most) for each in NUM_ROWS}
        sizes = [(num_rows, 0) for num_rows in sorted(alone)]
        for num_rows, behind in self._beside.items():
            sizes += ((num_rows, each) for each in behind if each <= max_tokens)
        kv_lens = [each for each in (1, shared_len) if each <= max_tokens]
        self._unrecorded = deque((*size, kv_len) for kv_len in kv_lens for size in sizes)
        with loading_kernels():
            for num_rows, num_prompt_tokens, kv_len in self._unrecorded:
                self._run(
                    num_rows, self._plan_any(num_rows, num_prompt_tokens, kv_len=kv_len), PLAIN
                )
            self._load_draws()

    def record_next(self) -> bool:
        """Record a step that `warm_up` has loaded, and compute none; False: all are recorded.

        Changes no seat and no page. The next step is planned anew.
        """
        while self._unrecorded:
            num_rows, num_prompt_tokens, kv_len = self._unrecorded.popleft()
            prompts = self._plan_any(num_rows, num_prompt_tokens, kv_len=kv_len)
            kind = self._kind(num_rows, prompts, PLAIN)
            assert kind is not None, "a step that was loaded takes one launch of attention"
            work = partial(self._work, num_rows, prompts, PLAIN)
            if self._recordings.record(kind, work, num_rows=num_rows):
                return True
        return False

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
            seats: One for each row; with prompt tokens, no more than `rows_beside` has rows for.
            has_new: Whether a seat may hold another sequence than in the last step.
            allowed: See EngineStep.
            prompts: To be computed in the same pass.
        """
        batch = self._batch
        num_rows = min(NUM_ROWS[bisect_left(NUM_ROWS, len(seats))], batch.seats.max_rows)
        if prompts is not None:
            num_rows = self.rows_beside(len(seats))
        index = np.array(seats, dtype=np.int64)
        if has_new or seats != self._row_seats:
            self._num_same = 0
        if seats != self._row_seats:
            self._set_rows(seats)
        rows = DecodeRows(
            kv_lens=batch.lengths[index],
            rows=np.arange(len(index)),
            table_starts=index * batch.page_table.shape[1],
        )
        self._plan(rows, batch.page_table.reshape(-1), num_rows, prompts)
        self._num_same += 1
        held = [row for row, seat in enumerate(seats) if seat in allowed] if allowed else []
        if held:
            bits = np.stack([allowed[seats[row]] for row in held])
            batch.seats.set_masks(num_rows, held, bits)
        draws = DrawKind(
            edits_logits=batch.edits_logits(index),
            has_logprobs=bool((batch.num_logprobs[index] >= 0).any()),
            has_masks=bool(held),
        )
        drawn = self._run(num_rows, prompts, draws)
        batch.lengths[index] += 1
        return drawn

    def rows_beside(self, num_seats: int) -> int:
        """Return how many rows a step with prompt tokens has for these seats; 0: it cannot run."""
        return next((rows for rows in self._beside if rows >= num_seats > 0), 0)

    def _set_rows(self, seats: tuple[int, ...]) -> None:
        row_seats = self._batch.seats.row_seats
        rows = np.full(len(row_seats), -1, dtype=np.int32)
        rows[: len(seats)] = seats
        row_seats.copy_(to_device(rows, row_seats.device))
        self._row_seats = seats

    def _plan(
        self,
        rows: DecodeRows,
        page_table: npt.NDArray[np.int32],
        num_rows: int,
        prompts: SentPrompts | None,
    ) -> None:
        is_next_step = 0 < self._num_same < REPLAN_STEPS
        if not is_next_step:
            self._num_same = 0
        token_ids, positions, append_page, append_offset = self._inputs_of(num_rows, prompts)
        inputs = PassInputs(
            token_ids_T=token_ids,
            positions_T=positions,
            append_page_T=append_page,
            append_offset_T=append_offset,
            kv_page_indices=self._batch.seats.page_table.view(-1),
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
        """Compute the planned step."""
        work = partial(self._work, num_rows, prompts, draws)
        kind = self._kind(num_rows, prompts, draws)
        return work() if kind is None else self._recordings.run(kind, work, num_rows=num_rows)

    def _kind(self, num_rows: int, prompts: SentPrompts | None, draws: DrawKind) -> Kind | None:
        """Return the kind of the planned step; None: it is not recorded."""
        launches = self._attention.recordable()
        if launches is None:
            return None
        return Kind(
            num_rows=num_rows,
            num_prompt_tokens=prompts.size if prompts else 0,
            launches=launches,
            draws=draws,
        )

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
        self._plan_any(1, 0, kv_len=1)
        for edits_logits, has_masks in product((False, True), repeat=2):
            draws = DrawKind(edits_logits=edits_logits, has_logprobs=True, has_masks=has_masks)
            self._work(1, None, draws)

    def _plan_any(
        self, num_rows: int, num_prompt_tokens: int, *, kv_len: int
    ) -> SentPrompts | None:
        """Plan a step of sequences on page 0, whoever has the seats; return its prompt tokens."""
        prompts = None
        if num_prompt_tokens and self._prompts is not None:
            prompts = self._prompts.send_any_behind(num_rows, num_prompt_tokens)
        rows = DecodeRows(
            kv_lens=np.full(num_rows, kv_len, dtype=np.int64),
            rows=np.arange(num_rows),
            table_starts=np.zeros(num_rows, dtype=np.int64),
        )
        page_table = np.zeros(num_pages_for(kv_len, self._batch.seats.page_size), dtype=np.int32)
        self._num_same = 0  # this and the next step are not like the one before
        with self._attention.sharing_all():
            self._plan(rows, page_table, num_rows, prompts)
        return prompts
