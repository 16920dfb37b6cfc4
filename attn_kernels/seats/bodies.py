"""Kernel bodies that gather a decode step's rows from the seats, and write its tokens back."""

import triton
import triton.language as tl

from attn_kernels.chain import wait_for_launch_before

# Columns of a seat's state, int64; those of floats hold the bits of a float64.
TOKEN = tl.constexpr(0)  # the last one, whose K and V the next step computes
LENGTH = tl.constexpr(1)  # tokens of the sequence, the last one included
TEMPERATURE = tl.constexpr(2)
TOP_P = tl.constexpr(3)
MIN_P = tl.constexpr(4)
TOP_K = tl.constexpr(5)
SEED = tl.constexpr(6)
MARKS_ROW = tl.constexpr(7)  # row of `marks`; -1: the sequence edits no logit
MIN_LENGTH = tl.constexpr(8)  # below this length end tokens are not drawn
REPETITION = tl.constexpr(9)
PRESENCE = tl.constexpr(10)
FREQUENCY = tl.constexpr(11)
NUM_FIELDS = tl.constexpr(12)

# Bits of a mark: occurrences of a vocabulary token in a sequence's history.
IS_SEEN = tl.constexpr(1)  # in the prompt or in the output
IS_END = tl.constexpr(2)  # ends the sequence
ONE_DRAWN = tl.constexpr(4)  # the rest counts occurrences in the output


# Not specialized: the number of rows must not cost a compilation.
@triton.jit(do_not_specialize=["num_rows"])
def read_seats_kernel(
    token_ids_ptr,  # [num_rows], int64
    positions_ptr,  # [num_rows], int64
    append_page_ptr,  # [num_rows], int64; -1: appended nowhere
    append_offset_ptr,  # [num_rows], int64
    params_ptr,  # [6, params_stride], int64: temperature, top_p, min_p, top_k, seed, position
    row_seats_ptr,  # [num_rows], int32; -1: a row that only fills up
    state_ptr,  # [num_seats, NUM_FIELDS], int64
    page_table_ptr,  # [num_seats, table_stride], int32
    num_rows,
    params_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (cdiv(num_rows, BLOCK),)
    if IS_CHAINED:
        wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    seats = tl.load(row_seats_ptr + rows, mask=is_row, other=-1).to(tl.int64)
    has_seat = seats >= 0
    state = state_ptr + seats * NUM_FIELDS
    length = tl.load(state + LENGTH, mask=has_seat, other=1)
    position = length - 1
    page = tl.load(
        page_table_ptr + seats * table_stride + position // PAGE_SIZE, mask=has_seat, other=-1
    )
    tl.store(token_ids_ptr + rows, tl.load(state + TOKEN, mask=has_seat, other=0), mask=is_row)
    tl.store(positions_ptr + rows, position, mask=is_row)
    tl.store(append_page_ptr + rows, page.to(tl.int64), mask=is_row)
    tl.store(append_offset_ptr + rows, position % PAGE_SIZE, mask=is_row)
    # A row without a seat is greedy: all bits 0.
    for column in tl.static_range(5):
        value = tl.load(state + TEMPERATURE + column, mask=has_seat, other=0)
        tl.store(params_ptr + column * params_stride + rows, value, mask=is_row)
    tl.store(params_ptr + 5 * params_stride + rows, length, mask=is_row)


@triton.jit
def edit_seats_kernel(
    out_ptr,  # [num_rows, vocab_size], float32
    logits_ptr,  # [num_rows, vocab_size], any float
    row_seats_ptr,  # [num_rows], int32; -1: a row that only fills up
    state_ptr,  # [num_seats, NUM_FIELDS], int64
    marks_ptr,  # [num_marks_rows, vocab_size], int32
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (num_rows, cdiv(vocab_size, BLOCK))
    if IS_CHAINED:
        wait_for_launch_before()
    my_row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    logits = tl.load(logits_ptr + my_row * logits_stride + tokens, mask=is_token, other=0.0)
    logits = logits.to(tl.float32)
    my_seat = tl.load(row_seats_ptr + my_row).to(tl.int64)
    my_state = state_ptr + tl.maximum(my_seat, 0) * NUM_FIELDS
    my_marks_row = tl.load(my_state + MARKS_ROW)
    if my_seat >= 0 and my_marks_row >= 0:
        repetition = tl.load(my_state + REPETITION).to(tl.float64, bitcast=True)
        presence = tl.load(my_state + PRESENCE).to(tl.float64, bitcast=True)
        frequency = tl.load(my_state + FREQUENCY).to(tl.float64, bitcast=True)
        may_end = tl.load(my_state + LENGTH) >= tl.load(my_state + MIN_LENGTH)
        marks = tl.load(marks_ptr + my_marks_row * vocab_size + tokens, mask=is_token, other=0)
        count = (marks // ONE_DRAWN).to(tl.float64)
        repetition = tl.where(marks & IS_SEEN != 0, repetition.to(tl.float32), 1.0)
        subtract = tl.where(count > 0, presence + frequency * count, 0.0).to(tl.float32)
        logits = tl.where(logits < 0, logits * repetition, tl.div_rn(logits, repetition))
        logits -= subtract
        logits = tl.where((marks & IS_END != 0) & (not may_end), float("-inf"), logits)
    tl.store(out_ptr + my_row * vocab_size + tokens, logits, mask=is_token)


@triton.jit(do_not_specialize=["num_rows"])
def write_seats_kernel(
    state_ptr,  # [num_seats, NUM_FIELDS], int64
    marks_ptr,  # [num_marks_rows, vocab_size], int32
    row_seats_ptr,  # [num_rows], int32; -1: a row that only fills up
    tokens_ptr,  # [num_rows], int32: drawn tokens; -1: none could be drawn
    num_rows,
    vocab_size,
    BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    # Grid: (cdiv(num_rows, BLOCK),)
    if IS_CHAINED:
        wait_for_launch_before()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    seats = tl.load(row_seats_ptr + rows, mask=is_row, other=-1).to(tl.int64)
    has_seat = seats >= 0
    state = state_ptr + seats * NUM_FIELDS
    tokens = tl.load(tokens_ptr + rows, mask=has_seat, other=-1).to(tl.int64)
    # Where nothing was drawn the sequence ends: until that is known, any token does.
    tl.store(state + TOKEN, tl.maximum(tokens, 0), mask=has_seat)
    length = tl.load(state + LENGTH, mask=has_seat, other=0)
    tl.store(state + LENGTH, length + 1, mask=has_seat)
    marks_row = tl.load(state + MARKS_ROW, mask=has_seat, other=-1)
    has_marks = (marks_row >= 0) & (tokens >= 0)
    mark = marks_ptr + marks_row * vocab_size + tokens
    marked = (tl.load(mark, mask=has_marks, other=0) + ONE_DRAWN) | IS_SEEN
    tl.store(mark, marked, mask=has_marks)
