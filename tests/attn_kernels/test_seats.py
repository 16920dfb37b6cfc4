"""What a step reads of the seats, how logits are edited, and where drawn tokens go."""

import numpy as np
import pytest
import torch

from attn_kernels.errors import CapacityError, DtypeError, ShapeError
from attn_kernels.seats import bodies, reference
from attn_kernels.seats.launch import DeviceSeats

VOCAB = 37
FIELDS = bodies.NUM_FIELDS.value


def random_seats(device: str, *, num_seats: int = 7, max_rows: int = 8) -> DeviceSeats:
    """Seats in which every second sequence edits its logits."""
    source = torch.Generator().manual_seed(5)
    seats = DeviceSeats(
        num_seats=num_seats,
        pages_per_seat=5,
        page_size=4,
        vocab_size=VOCAB,
        max_rows=max_rows,
        device=torch.device(device),
    )
    state = torch.randint(0, 1 << 40, (num_seats, FIELDS), generator=source)
    state[:, bodies.TOKEN.value] = torch.randint(0, VOCAB, (num_seats,), generator=source)
    state[:, bodies.LENGTH.value] = torch.randint(1, 20, (num_seats,), generator=source)
    state[:, bodies.MIN_LENGTH.value] = 10
    state[:, bodies.MARKS_ROW.value] = torch.tensor([i // 2 if i % 2 else -1 for i in range(7)])
    floats = state.view(torch.float64)
    for column in (bodies.REPETITION, bodies.PRESENCE, bodies.FREQUENCY):
        floats[:, column.value] = torch.rand(num_seats, generator=source, dtype=torch.float64) + 0.5
    seats.state.copy_(state)
    table = torch.randint(0, 1000, seats.page_table.shape, generator=source, dtype=torch.int32)
    seats.page_table.copy_(table)
    counts = torch.randint(0, 3, seats.marks.shape, generator=source, dtype=torch.int32)
    flags = torch.randint(0, 4, seats.marks.shape, generator=source, dtype=torch.int32)
    seen = (counts > 0).int() * bodies.IS_SEEN.value
    seats.marks.copy_(counts * bodies.ONE_DRAWN.value | flags | seen)
    return seats


def set_rows(seats: DeviceSeats, rows: list[int]) -> None:
    seats.row_seats[: len(rows)] = torch.tensor(rows, dtype=torch.int32)


ROWS = [3, -1, 0, 5, 6, 1, -1, 2]


def test_a_step_reads_what_its_rows_seats_hold(device: str):
    seats = random_seats(device)
    set_rows(seats, ROWS)

    params = seats.read(len(ROWS))

    expected = reference.read(seats.state, seats.page_table, seats.row_seats, seats.page_size)
    for name in ("token_ids", "positions", "append_page", "append_offset"):
        assert torch.equal(getattr(seats, name), expected[name]), name
    found = (params.temperature, params.top_p, params.min_p, params.top_k, params.seeds)
    for column, wanted in zip((*found, params.positions), expected["params"], strict=True):
        assert torch.equal(column.view(torch.int64), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_edited_by_each_sequences_history_and_left_where_there_is_none(
    device: str, dtype: torch.dtype
):
    seats = random_seats(device)
    set_rows(seats, ROWS)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((len(ROWS), VOCAB), generator=generator).to(dtype).to(device)

    edited = seats.edit(logits)

    expected = reference.edit(logits, seats.state, seats.marks, seats.row_seats)
    assert edited.dtype == torch.float32
    assert torch.equal(edited, expected)
    plain = [row for row, seat in enumerate(ROWS) if seat % 2 == 0 or seat < 0]
    assert torch.equal(edited[plain], logits[plain].float())
    assert edited.isinf().any(), "no end token was banned"
    assert (edited != logits.float()).any(1).sum() == 3


def test_drawn_tokens_go_to_their_seats_and_into_their_histories(device: str):
    seats = random_seats(device)
    set_rows(seats, ROWS)
    tokens = torch.tensor([4, 9, 8, -1, 2, 30, -1, 36], dtype=torch.int32, device=device)
    state, marks = seats.state.clone(), seats.marks.clone()
    reference.write(state, marks, seats.row_seats, tokens)

    seats.write(tokens)

    assert torch.equal(seats.state, state)
    assert torch.equal(seats.marks, marks)
    assert seats.state[4].equal(random_seats(device).state[4]), "a seat that had no row changed"
    # Read by the next step as its input, one place further.
    seats.read(len(ROWS))
    assert seats.token_ids.tolist() == [4, 0, 8, 0, 2, 30, 0, 36]


def test_a_mark_counts_each_occurrence(device: str):
    seats = random_seats(device)
    seats.marks.zero_()
    set_rows(seats, [1])
    for _ in range(3):
        seats.write(torch.tensor([6], dtype=torch.int32, device=device))

    assert seats.marks[0, 6] == 3 * bodies.ONE_DRAWN.value + bodies.IS_SEEN.value
    assert seats.marks.count_nonzero() == 1


def test_rows_without_a_bitmap_may_draw_all_tokens_whatever_they_had_before(device: str):
    seats = random_seats(device)
    first = np.array([[5, 6]], dtype=np.int32)
    seats.set_masks(4, [2], first)

    seats.set_masks(4, [3, 0], np.array([[1, 2], [3, 4]], dtype=np.int32))

    assert seats.masks[:4].tolist() == [[3, 4], [-1, -1], [-1, -1], [1, 2]]
    assert seats.masks[4:].count_nonzero() == 0


@pytest.mark.parametrize("row", [-1, 4, 8])
def test_a_bitmap_of_a_row_that_the_step_does_not_have_is_refused(row: int, launches: list[object]):
    """Rows 4 to 7 exist, but not in this step; an index of row 8 would cost the device."""
    seats = random_seats("cpu")

    with pytest.raises(ShapeError, match=f"rows contains {row}, must be 0 to 3"):
        seats.set_masks(4, [2, row], np.array([[1, 2], [3, 4]], dtype=np.int32))

    assert seats.masks.count_nonzero() == 0, "it was written all the same"


def test_too_many_rows_and_foreign_tensors_are_refused(launches: list[object]):
    seats = random_seats("cpu")

    with pytest.raises(CapacityError, match="9 rows, at most 8 are gathered"):
        seats.read(9)
    with pytest.raises(ShapeError, match="num_rows is 0"):
        seats.read(0)
    with pytest.raises(DtypeError, match="tokens is torch\\.int64"):
        seats.write(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="logits has shape"):
        seats.edit(torch.zeros(2, VOCAB + 1))
    with pytest.raises(ShapeError, match="num_seats is 0"):
        DeviceSeats(
            num_seats=0,
            pages_per_seat=1,
            page_size=1,
            vocab_size=1,
            max_rows=1,
            device=torch.device("cpu"),
        )
    assert launches == []
