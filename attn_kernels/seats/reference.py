"""Reference of the seats' kernels, in torch; launch.py describes the arguments."""

import torch
from torch import Tensor

from attn_kernels.seats import bodies

TOKEN, LENGTH = bodies.TOKEN.value, bodies.LENGTH.value


def read(state: Tensor, page_table: Tensor, row_seats: Tensor, page_size: int) -> dict[str, Tensor]:
    """Return the results of `DeviceSeats.read`; `params` is [6, num_rows], int64."""
    has_seat = row_seats >= 0
    seats = row_seats.clamp(min=0).long()
    rows = torch.where(has_seat.unsqueeze(1), state[seats], 0)
    length = torch.where(has_seat, rows[:, LENGTH], 1)
    position = length - 1
    page = page_table[seats, position // page_size].long()
    first = bodies.TEMPERATURE.value
    return {
        "token_ids": rows[:, TOKEN],
        "positions": position,
        "append_page": torch.where(has_seat, page, -1),
        "append_offset": position % page_size,
        "params": torch.cat((rows[:, first : first + 5].T, length.unsqueeze(0))),
    }


def edit(logits: Tensor, state: Tensor, marks: Tensor, row_seats: Tensor) -> Tensor:
    """Return the edited logits, float32."""
    edited = logits.float().clone()
    for row, seat in enumerate(row_seats.tolist()):
        marks_row = int(state[seat, bodies.MARKS_ROW.value]) if seat >= 0 else -1
        if marks_row < 0:
            continue
        floats = state[seat].view(torch.float64)
        columns = (bodies.REPETITION, bodies.PRESENCE, bodies.FREQUENCY)
        repetition, presence, frequency = (floats[column.value] for column in columns)
        mark = marks[marks_row]
        count = (mark // bodies.ONE_DRAWN.value).double()
        factor = torch.where(mark & bodies.IS_SEEN.value != 0, repetition, 1.0).float()
        values = torch.where(edited[row] < 0, edited[row] * factor, edited[row] / factor)
        values -= torch.where(count > 0, presence + frequency * count, 0.0).float()
        if state[seat, LENGTH] < state[seat, bodies.MIN_LENGTH.value]:
            values[mark & bodies.IS_END.value != 0] = -torch.inf
        edited[row] = values
    return edited


def write(state: Tensor, marks: Tensor, row_seats: Tensor, tokens: Tensor) -> None:
    """Change `state` and `marks` as `DeviceSeats.write` does."""
    for seat, token in zip(row_seats.tolist(), tokens.tolist(), strict=False):
        if seat < 0:
            continue
        state[seat, TOKEN] = max(token, 0)
        state[seat, LENGTH] += 1
        marks_row = int(state[seat, bodies.MARKS_ROW.value])
        if marks_row >= 0 and token >= 0:
            mark = marks[marks_row, token] + bodies.ONE_DRAWN.value
            marks[marks_row, token] = mark | bodies.IS_SEEN.value
