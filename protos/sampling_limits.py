"""Limits of sampling parameters: routers check requests, and workers check again.

Floats travel as float32. Rounding moves no value over a limit, except a top_p below 1e-45.
"""

from collections.abc import Callable
from dataclasses import dataclass

MAX_CHOICES = 64  # n of any request
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 256
MAX_SEED = 2**64 - 1
# Divisors of logits: beyond these float32 overflows, and the draw would see NaN.
MIN_DIVISOR, MAX_DIVISOR = 1e-3, 1e3
DIVISORS = f"{MIN_DIVISOR:g} to {MAX_DIVISOR:g}"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a sampling parameter, or a model's default for it, may have."""

    holds: Callable[[float], bool]  # False for NaN
    allowed: str


RANGES = {
    "temperature": Range(
        lambda value: value == 0 or MIN_DIVISOR <= value <= MAX_DIVISOR,
        f"0 for greedy, or {DIVISORS}",
    ),
    "top_p": Range(lambda value: 0 < value <= 1, "above 0, up to 1"),
    "min_p": Range(lambda value: 0 <= value <= 1, "0 to 1"),
    "repetition_penalty": Range(lambda value: MIN_DIVISOR <= value <= MAX_DIVISOR, DIVISORS),
    "presence_penalty": Range(lambda value: -2 <= value <= 2, "-2 to 2"),
    "frequency_penalty": Range(lambda value: -2 <= value <= 2, "-2 to 2"),
}
# What an operator or a model's authors may set as the default of a request that sets nothing.
DEFAULT_RANGES = {
    **{name: RANGES[name] for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "top_k": Range(
        lambda value: isinstance(value, int) and -1 <= value < 2**32, "an integer, -1 or 0 for off"
    ),
}


def is_default(name: str, value: object) -> bool:
    """Return whether a value of any type may be the default of a parameter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return DEFAULT_RANGES[name].holds(value)
