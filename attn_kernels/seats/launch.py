"""The device batch: everything that a running sequence needs for its next step without the host.

A sequence keeps its seat from its first step to its last. A step names the seats that take part,
one row each: `read` gathers what the model's layers and the sampler need of them, and `write` puts
the drawn tokens back, from where the next step reads them. So a step can be launched before the
tokens of the one before have reached the host. All of it may be captured in a CUDA graph.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from attn_kernels.chain import chained
from attn_kernels.checks import check_at_least_one, check_tensor
from attn_kernels.errors import CapacityError, ShapeError
from attn_kernels.sampling.launch import LOGIT_DTYPES
from attn_kernels.sampling.rows import RowParams
from attn_kernels.seats.bodies import (
    NUM_FIELDS,
    edit_seats_kernel,
    read_seats_kernel,
    write_seats_kernel,
)
from attn_kernels.tiles import to_device

ROW_BLOCK = 128
EDIT_BLOCK = 4096
NUM_PARAMS = 6  # of a draw
ALL_BITS = -1  # a word of a mask that allows all its tokens


class DeviceSeats:
    """Seats and rows at fixed addresses.

    Whatever changes a seat is a copy or a kernel on the stream of the steps, so that a step which
    still runs never reads the state of a later one.

    Args:
        num_seats: Sequences that run at once.
        pages_per_seat: Most pages of a sequence.
        page_size: Token slots in a page.
        vocab_size: Tokens of a row of logits.
        max_rows: Most rows of a step, those that only fill up included.
        device: The device of all tensors.

    Attributes:
        state: [num_seats, NUM_FIELDS], int64; see bodies.py for the columns.
        page_table: Page ids in token order, [num_seats, pages_per_seat], int32.
        marks: What the history of each sequence that edits logits says of each token,
            [num_seats, vocab_size], int32; see bodies.py for the bits.
        row_seats: The seat of each row, [max_rows], int32; -1 fills up.
        masks: Bitmaps of the tokens that each row may draw, [max_rows, cdiv(vocab_size, 32)],
            int32, as `TokenSampler.sample` takes them; see `set_masks`.
        inputs: What `read` gathers, [4, max_rows], int64; its rows are token_ids, positions,
            append_page and append_offset.
    """

    def __init__(
        self,
        *,
        num_seats: int,
        pages_per_seat: int,
        page_size: int,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        for name, value in (
            ("num_seats", num_seats),
            ("pages_per_seat", pages_per_seat),
            ("page_size", page_size),
            ("vocab_size", vocab_size),
            ("max_rows", max_rows),
        ):
            check_at_least_one(name, value)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.page_size = page_size
        self.max_rows = max_rows
        self.state = zeros(num_seats, NUM_FIELDS.value)
        self.page_table = zeros(num_seats, pages_per_seat, dtype=torch.int32)
        self.marks = zeros(num_seats, vocab_size, dtype=torch.int32)
        self.row_seats = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.masks = zeros(max_rows, triton.cdiv(vocab_size, 32), dtype=torch.int32)
        self.inputs = zeros(4, max_rows)
        self.token_ids, self.positions, self.append_page, self.append_offset = self.inputs
        self._params = zeros(NUM_PARAMS, max_rows)

    def read(self, num_rows: int) -> RowParams:
        """Gather the first `num_rows` rows; return how their tokens are drawn.

        A row without a seat gets token 0 at position 0, is appended nowhere and drawn greedily.
        """
        self._check_rows(num_rows)
        read_seats_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
            self.token_ids,
            self.positions,
            self.append_page,
            self.append_offset,
            self._params,
            self.row_seats,
            self.state,
            self.page_table,
            num_rows,
            self.max_rows,
            self.page_table.shape[1],
            PAGE_SIZE=self.page_size,
            BLOCK=ROW_BLOCK,
            num_warps=4,
            **chained(self.state),
        )
        return self.row_params(num_rows)

    def row_params(self, num_rows: int) -> RowParams:
        """Return where `read` puts how tokens are drawn."""
        columns = self._params[:, :num_rows]
        temperature, top_p, min_p = columns[:3].view(torch.float64)
        top_k, seeds, positions = columns[3:]
        return RowParams(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            seeds=seeds,
            positions=positions,
        )

    def edit(self, logits: Tensor) -> Tensor:
        """Return logits with penalties, and with end tokens banned where they may not come yet.

        The logit of a token that was seen is divided by the repetition penalty if positive, else
        multiplied by it; then the presence penalty is subtracted if the token was drawn before, and
        the frequency penalty once for each time.

        Args:
            logits: [num_rows, vocab_size], float32, bfloat16 or float16, rows of any stride.

        Returns:
            [num_rows, vocab_size], float32, newly allocated.
        """
        vocab_size = self.marks.shape[1]
        check_tensor(
            "logits",
            logits,
            shape=(None, vocab_size),
            dtype=LOGIT_DTYPES,
            device=self.state.device,
            contiguous_from=1,
        )
        num_rows = logits.shape[0]
        self._check_rows(num_rows)
        out = logits.new_empty((num_rows, vocab_size), dtype=torch.float32)
        edit_seats_kernel[(num_rows, triton.cdiv(vocab_size, EDIT_BLOCK))](
            out,
            logits,
            self.row_seats,
            self.state,
            self.marks,
            logits.stride(0),
            vocab_size,
            BLOCK=EDIT_BLOCK,
            num_warps=8,
            # A product that is not rounded before the sum would have other bits than the host's.
            enable_fp_fusion=False,
            **chained(self.state),
        )
        return out

    def set_masks(self, num_rows: int, rows: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        """Restrict some of the first `num_rows` rows to the tokens that their bitmaps allow.

        Args:
            num_rows: The number of rows of the step.
            rows: The rows with a bitmap, at least one.
            bits: Their bitmaps, [len(rows), cdiv(vocab_size, 32)].
        """
        self._check_rows(num_rows)
        for row in (min(rows), max(rows)):
            if not 0 <= row < num_rows:
                # Its bitmap would be lost, or the device if there is no such row.
                raise ShapeError(f"rows contains {row}, must be 0 to {num_rows - 1}")
        device = self.masks.device
        self.masks[:num_rows].fill_(ALL_BITS)
        index = to_device(np.array(rows, dtype=np.int64), device)
        self.masks.index_copy_(0, index, to_device(bits, device))

    def write(self, tokens: Tensor) -> None:
        """Make drawn tokens the last ones of their rows' sequences, each a token longer now.

        Args:
            tokens: [num_rows], int32; -1 where nothing could be drawn.
        """
        check_tensor("tokens", tokens, shape=(None,), dtype=torch.int32, device=self.state.device)
        num_rows = len(tokens)
        self._check_rows(num_rows)
        write_seats_kernel[(triton.cdiv(num_rows, ROW_BLOCK),)](
            self.state,
            self.marks,
            self.row_seats,
            tokens,
            num_rows,
            self.marks.shape[1],
            BLOCK=ROW_BLOCK,
            num_warps=4,
            **chained(self.state),
        )

    def _check_rows(self, num_rows: int) -> None:
        check_at_least_one("num_rows", num_rows)
        if num_rows > self.max_rows:
            raise CapacityError(f"{num_rows} rows, at most {self.max_rows} are gathered")
