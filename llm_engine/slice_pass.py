"""A pass over slices: from the tokens of sequences without a seat to logits and drawn tokens.

Legend: R rows with draws, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from attn_kernels.tiles import to_device
from kv_cache.torch_storage import TorchPageStorage
from llm_engine.forward_batch import build_forward_batch
from llm_engine.sampling import Draw, Drawn, SampledToken, SequenceSlice
from llm_engine.transformer import Decoder


def draws_of(slices: Sequence[SequenceSlice]) -> list[Draw]:
    """Return the draws of all slices, in order."""
    return [draw for each in slices for draw in each.draws]


def run_slices(
    storage: TorchPageStorage, decoder: Decoder, slices: Sequence[SequenceSlice]
) -> Tensor | None:
    """Compute slices; return the logits of each draw, [num_draws, V], or None without draws."""
    batch = build_forward_batch(slices, storage.layout.page_size, storage.device)
    return logits_of_draws(decoder, slices, decoder.hidden_states(batch))


def logits_of_draws(
    decoder: Decoder, slices: Sequence[SequenceSlice], hidden_TD: Tensor
) -> Tensor | None:
    """Return the logits of each draw, [num_draws, V], or None without draws.

    Args:
        decoder: Computed the slices.
        slices: Each with new tokens.
        hidden_TD: Of the new tokens of all slices; rows behind them are ignored.
    """
    num_draws = np.array([len(each.draws) for each in slices])
    if not num_draws.any():
        return None
    last_tokens = np.cumsum([len(each.token_ids) for each in slices]) - 1
    rows = last_tokens[num_draws > 0]
    device = hidden_TD.device
    logits_RV = decoder.logits(hidden_TD[to_device(rows, device)])
    repeats = num_draws[num_draws > 0]
    if repeats.max() == 1:
        return logits_RV
    return logits_RV[to_device(np.repeat(np.arange(len(rows)), repeats), device)]


def drawn_after(
    slices: Sequence[SequenceSlice], tokens: Sequence[SampledToken | None]
) -> list[Drawn]:
    """Distribute the tokens of all draws to their slices."""
    left = iter(tokens)
    return [_all_or_none([next(left) for _ in each.draws]) for each in slices]


def _all_or_none(tokens: Sequence[SampledToken | None]) -> Drawn:
    drawn = tuple(token for token in tokens if token is not None)
    return drawn if len(drawn) == len(tokens) else None
