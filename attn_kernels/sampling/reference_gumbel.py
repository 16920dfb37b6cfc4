"""Random numbers of a draw as a function of (seed, position, token id) alone.

h = mix(base + (token + 1) * GOLDEN) with base = mix(mix(seed + GOLDEN) ^ (position * ODD)), all
modulo 2**64, where mix is the finalizer of splitmix64: for one (seed, position) these are the
outputs of splitmix64 started at `base`. The integers are equal on every device. Position and token
need no state and no order, so that a draw can be repeated anywhere.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E37_79B9_7F4A_7C15)
_ODD = _signed(0xD1B5_4A32_D192_ED03)
_MULTIPLIER_1 = _signed(0xBF58_476D_1CE4_E5B9)
_MULTIPLIER_2 = _signed(0x94D0_49BB_1331_11EB)


def draw_bases(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Return the number, int64 [R], that represents each (seed, position), int64 as well."""
    return _mix_(_mix_(seeds_R + _GOLDEN) ^ positions_R * _ODD)


def random_bits(bases_R: Tensor, num_tokens: int) -> Tensor:
    """Return 64 random bits for each row and token id, int64 [R, num_tokens].

    Args:
        bases_R: Results of draw_bases.
        num_tokens: The vocabulary: token ids 0..num_tokens - 1.
    """
    ids = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=bases_R.device)
    return _mix_(bases_R.unsqueeze(1) + ids * _GOLDEN)


def gumbel_noise(bases_R: Tensor, num_tokens: int) -> Tensor:
    """Return standard Gumbel noise for each row and token id, float64 [R, num_tokens], finite.

    Uses the upper 52 bits, so that large values, which decide about rare tokens, are as fine as
    the others: v = (bits + 1/2) / 2**52 is neither 0 nor 1, and -log(v) is small where v is near 1.
    """
    noise = _shift_right(random_bits(bases_R, num_tokens), 12).to(torch.float64)
    noise += 0.5
    noise *= -(2.0**-52)
    # An exponential variable E = -log(1 - v); the Gumbel variable is -log(E).
    return noise.log1p_().neg_().log_().neg_()


def _mix_(bits: Tensor) -> Tensor:
    """Mix in place; int64 wraps around."""
    bits ^= _shift_right(bits, 30)
    bits *= _MULTIPLIER_1
    bits ^= _shift_right(bits, 27)
    bits *= _MULTIPLIER_2
    bits ^= _shift_right(bits, 31)
    return bits


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift zeros in from the left: torch's own shift of int64 repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
