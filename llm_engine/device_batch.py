"""The running sequences of an engine that launches a step before the last one's tokens are known.

The state of each seat lies on the device (`attn_kernels.seats`). This module also keeps what the
host knows in advance: lengths, page tables, and which sequences edit logits or need log
probabilities. Changes are sent as one packed copy per step; a step without changes sends nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attn_kernels.seats import bodies
from attn_kernels.seats.launch import DeviceSeats
from attn_kernels.tiles import to_device
from llm_engine.drawing import end_token_ids
from llm_engine.engine_step import EngineStep, SeatStart
from llm_engine.sampling import SamplingParams, choice_seed

NO_EDIT, ALWAYS_EDIT = 0, 1 << 62


class DeviceBatch:
    """Seats on the device, and the host's knowledge of them.

    Attributes:
        lengths: Tokens of each seat's sequence, including those of launched steps, [num_seats].
        page_table: Page ids, [num_seats, pages_per_seat]; arbitrary after a sequence's own.
        num_logprobs: Logprobs per token of each seat; -1: none, [num_seats].
    """

    def __init__(self, seats: DeviceSeats, vocab_size: int) -> None:
        num_seats, pages_per_seat = seats.page_table.shape
        self.seats = seats
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_seats, dtype=np.int64)
        self.page_table: npt.NDArray[np.int32] = np.zeros(
            (num_seats, pages_per_seat), dtype=np.int32
        )
        self.num_logprobs: npt.NDArray[np.int64] = np.full(num_seats, -1, dtype=np.int64)
        self._num_pages: npt.NDArray[np.int64] = np.zeros(num_seats, dtype=np.int64)
        self._edits_until: npt.NDArray[np.int64] = np.zeros(num_seats, dtype=np.int64)
        self._vocab_size = vocab_size

    def change(self, step: EngineStep) -> None:
        """Apply ended and started sequences and added pages, on the current stream."""
        if not (step.started or step.extended):
            return
        entries = [self._enter_pages(each.seat, 0, each.page_ids) for each in step.started]
        entries += [
            self._enter_pages(each.seat, int(self._num_pages[each.seat]), each.page_ids)
            for each in step.extended
        ]
        states = [self._start(each) for each in step.started]
        self._send(step.started, states, entries)

    def edits_logits(self, seats: npt.NDArray[np.int64]) -> bool:
        """Return whether any of these sequences has a penalty, or may not end yet."""
        return bool((self.lengths[seats] < self._edits_until[seats]).any())

    def _enter_pages(self, seat: int, first: int, page_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Note pages from index `first` on; return [2, pages]: indices in the flat table, ids."""
        end = first + len(page_ids)
        row = self.page_table[seat]
        assert end <= len(row), "more pages than a sequence may have"
        row[first:end] = page_ids
        self._num_pages[seat] = end
        places = np.arange(first, end, dtype=np.int64) + seat * len(row)
        return np.stack((places, row[first:end].astype(np.int64)))

    def _start(self, start: SeatStart) -> npt.NDArray[np.int64]:
        """Note what the host needs of a sequence; return the state of its seat."""
        params = start.params
        num_prompt_tokens = len(start.prompt_token_ids)
        seat = start.seat
        min_length = num_prompt_tokens + params.min_tokens
        self.lengths[seat] = start.num_tokens
        self.num_logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        may_not_end = start.num_tokens < min_length
        self._edits_until[seat] = NO_EDIT
        if params.has_penalties:
            self._edits_until[seat] = ALWAYS_EDIT
        elif may_not_end:
            self._edits_until[seat] = min_length
        marks_row = -1
        if params.has_penalties or may_not_end:
            self._mark(start)
            marks_row = seat
        state = np.zeros(bodies.NUM_FIELDS.value, dtype=np.int64)
        state[bodies.TOKEN.value] = start.output_token_ids[-1]
        state[bodies.LENGTH.value] = start.num_tokens
        state[bodies.TOP_K.value] = params.top_k
        state[bodies.SEED.value] = _signed(choice_seed(params.seed, start.choice))
        state[bodies.MARKS_ROW.value] = marks_row
        state[bodies.MIN_LENGTH.value] = min_length
        floats = state.view(np.float64)
        for column, value in _float_fields(params):
            floats[column] = value
        return state

    def _mark(self, start: SeatStart) -> None:
        """Write what the sequence's history says of each token."""
        output = np.asarray(start.output_token_ids, dtype=np.int64)
        marks = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        marks *= bodies.ONE_DRAWN.value
        marks[output] |= bodies.IS_SEEN.value
        marks[np.asarray(start.prompt_token_ids, dtype=np.int64)] |= bodies.IS_SEEN.value
        ends = np.asarray(end_token_ids(start.params, start.eos_token_ids), dtype=np.int64)
        marks[ends] |= bodies.IS_END.value
        self.seats.marks[start.seat].copy_(to_device(marks, self.seats.marks.device))

    def _send(
        self,
        started: Sequence[SeatStart],
        states: Sequence[npt.NDArray[np.int64]],
        entries: Sequence[npt.NDArray[np.int64]],
    ) -> None:
        """Bring states and page-table entries to the device, in one copy."""
        seat_ids = np.array([each.seat for each in started], dtype=np.int64)
        table = np.concatenate(entries, axis=1)
        packed = np.concatenate((seat_ids, *states, table.ravel()))
        device = self.seats.state.device
        sent = to_device(packed, device)
        num_states, num_pages = len(states), table.shape[1]
        sizes = [num_states, num_states * bodies.NUM_FIELDS.value, num_pages, num_pages]
        where, values, places, page_ids = torch.split(sent, sizes)
        if num_states:
            self.seats.state.index_copy_(0, where, values.view(num_states, -1))
        flat_table = self.seats.page_table.view(-1)
        flat_table.index_copy_(0, places, page_ids.to(torch.int32))


def _float_fields(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    return (
        (bodies.TEMPERATURE.value, params.temperature),
        (bodies.TOP_P.value, params.top_p),
        (bodies.MIN_P.value, params.min_p),
        (bodies.REPETITION.value, params.repetition_penalty),
        (bodies.PRESENCE.value, params.presence_penalty),
        (bodies.FREQUENCY.value, params.frequency_penalty),
    )


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
