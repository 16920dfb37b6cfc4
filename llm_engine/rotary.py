"""Rotary position embedding: the table of cosines and sines for attention back ends.

The arithmetic is float32, step by step as in transformers: at long positions a more exact phase
would be a different model.
"""

import math

import torch
from torch import Tensor

from llm_engine.rope_config import (
    DefaultRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    RopeConfig,
    YarnRope,
)


def rotary_table(
    rope: RopeConfig, *, head_dim: int, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [num_positions, head_dim / 2], for half rotation.

    Element i of the second dimension rotates the pair (x[i], x[i + head_dim / 2]).
    """
    frequencies = inverse_frequencies(rope, head_dim)
    positions = torch.arange(num_positions, dtype=torch.float32)
    phases = torch.outer(positions, frequencies)
    scale = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    return (phases.cos() * scale).to(device), (phases.sin() * scale).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the phase per position of each rotated pair, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope:
        case DefaultRope():
            return frequencies
        case LinearRope():
            return frequencies / rope.factor
        case Llama3Rope():
            return _llama3_frequencies(rope, frequencies)
        case FactorsRope():
            return frequencies / torch.tensor(rope.factors)
        case YarnRope():
            return _yarn_frequencies(rope, frequencies)


def _llama3_frequencies(rope: Llama3Rope, frequencies: Tensor) -> Tensor:
    context = rope.original_context_tokens
    wavelengths = 2 * math.pi / frequencies
    # 0 where a wave is to be interpolated, 1 where it is to be kept.
    kept_share = (context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    interpolated = frequencies / rope.factor
    blended = (1 - kept_share) * interpolated + kept_share * frequencies
    is_long = wavelengths > context / rope.low_freq_factor
    is_short = wavelengths < context / rope.high_freq_factor
    return torch.where(is_long, interpolated, torch.where(is_short, frequencies, blended))


def _yarn_frequencies(rope: YarnRope, frequencies: Tensor) -> Tensor:
    head_dim = 2 * len(frequencies)

    def pair_with_turns(turns: float) -> float:
        """Return the (fractional) pair that makes this many turns in the original context."""
        wavelength = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / width
    kept_share = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - kept_share) + frequencies * kept_share
