"""What a sampler takes and gives besides logits and tokens: tensors with a value for each row."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParams:
    """How each row is sampled; tensors of [num_rows] on the device of the logits.

    Values are not checked, because that would wait for the device: what is out of range draws some
    token of the row.
    """

    temperature: Tensor  # float64 >= 0; 0 is greedy and ignores the filters
    top_k: Tensor  # int64; 0, or the vocabulary's size and more, is off
    top_p: Tensor  # float64 in (0, 1]; 1 is off
    min_p: Tensor  # float64 in [0, 1]; 0 is off
    seeds: Tensor  # int64, as its 64 bits
    positions: Tensor  # int64, number of tokens before the drawn one


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitEdits:
    """Logits to change before anything else, one entry per (row, token), none twice.

    A logit is divided by `repetition` if positive, else multiplied by it; then `subtract` is
    subtracted: penalties, or inf to ban the token. Tensors of [num_entries].
    """

    rows: Tensor  # int32; -1 fills up a buffer that a CUDA graph has fixed
    tokens: Tensor  # int32
    repetition: Tensor  # float32
    subtract: Tensor  # float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities of the logits as they are, without any edit or filter."""

    chosen: Tensor  # [num_rows], float32; NaN for a row without token
    top: Tensor  # [num_rows, num_top], float32, falling
    top_tokens: Tensor  # [num_rows, num_top], int32; of equal ones the lowest id first; -1: none
