"""Penalties and bans as edits of single logits, for any device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from grammars.bits import ALL_BITS, TokenBits
from llm_engine.sampling import Draw


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitEntries:
    """One entry per (row, token) that a penalty or a ban changes, E of them.

    The logit is divided by `repetition` if positive, else multiplied by it; then `subtract` is
    subtracted.
    """

    rows_E: npt.NDArray[np.int32]
    tokens_E: npt.NDArray[np.int32]
    repetition_E: npt.NDArray[np.float32]
    subtract_E: npt.NDArray[np.float32]  # presence and frequency together; inf bans the token


def logit_entries(draws: Sequence[Draw]) -> LogitEntries | None:
    """Return the edits of all rows, None if there are none.

    The repetition penalty applies to tokens of prompt and output, presence and frequency penalties
    to those of the output.
    """
    parts = [
        (np.full(len(tokens), row), tokens, repetition, subtract)
        for row, draw in enumerate(draws)
        if draw.params.has_penalties or draw.banned_token_ids
        for tokens, repetition, subtract in [_entries_of(draw)]
    ]
    if not parts:
        return None
    rows, tokens, repetition, subtract = (np.concatenate(each) for each in zip(*parts, strict=True))
    return LogitEntries(
        rows_E=rows.astype(np.int32),
        tokens_E=tokens.astype(np.int32),
        repetition_E=repetition.astype(np.float32),
        subtract_E=subtract.astype(np.float32),
    )


def allowed_rows(allowed: Sequence[TokenBits | None]) -> npt.NDArray[np.int32] | None:
    """Return the bitmaps of all rows, [R, words], if any row has one."""
    one = next((bits for bits in allowed if bits is not None), None)
    if one is None:
        return None
    return np.stack([np.full_like(one, ALL_BITS) if bits is None else bits for bits in allowed])


def _entries_of(draw: Draw) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    params = draw.params
    banned = np.unique(np.asarray(draw.banned_token_ids, dtype=np.int64))
    if not params.has_penalties:
        return banned, np.ones(len(banned)), np.full(len(banned), np.inf)
    output, counts = np.unique(
        np.asarray(draw.output_token_ids, dtype=np.int64), return_counts=True
    )
    seen = np.union1d(np.asarray(draw.prompt_token_ids, dtype=np.int64), output)
    tokens = np.union1d(seen, banned)
    repetition = np.ones(len(tokens))
    repetition[np.searchsorted(tokens, seen)] = params.repetition_penalty
    subtract = np.zeros(len(tokens))
    subtract[np.searchsorted(tokens, output)] = (
        params.presence_penalty + params.frequency_penalty * counts
    )
    subtract[np.searchsorted(tokens, banned)] = np.inf
    return tokens, repetition, subtract
