"""Draws tokens from logits on the device that holds them; results come back in one copy.

Order per row, each step only if requested: penalties, banned tokens, the mask of a constraint,
temperature, top-k, top-p over the renormalized rest, min-p relative to the most probable, then
Gumbel-max. The filters give a threshold on the logit: a token as probable as the last one kept is
kept, too, so that the set does not depend on the order of ties. (Of tokens that tie with the k-th,
top-p counts only as many as make k.) Masses are integers in units of 2**-40 of the most probable
token's, so that sums have one value on any device. Greedy rows take the most probable token, and
the lowest id among ties. Nothing depends on other rows. `sampler_triton` draws the same tokens on
GPUs without sorting.

Legend: R rows (one per draw), V vocabulary, E edited logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_engine.gumbel import draw_base, gumbel_noise
from llm_engine.logit_edits import allowed_rows, logit_entries
from llm_engine.sampling import Draw, SampledToken

# Logits that are filtered and drawn at a time: each float64 or int64 temporary is 32 MiB.
CHUNK_ELEMENTS = 1 << 22
MASS_UNIT = 2.0**40


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
    """Draw one token per row; blocks until the tokens are on the host.

    Args:
        logits_RV: Any float dtype; not modified.
        draws: One per row.

    Returns:
        None for a row whose largest logit is NaN, inf, or -inf.
    """
    logits = logits_RV.float()
    edited = _mask(_edit(logits, draws), draws)
    tokens = edited.argmax(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if draw.params.temperature != 0]
    rows_at_once = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for first in range(0, len(random_rows), rows_at_once):
        rows = random_rows[first : first + rows_at_once]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw_randomly(edited[index], [draws[row] for row in rows])
    tokens[~edited.amax(dim=-1).isfinite()] = -1
    return sampled_tokens(tokens.tolist(), logprobs_of(logits, draws, tokens))


def sampled_tokens(
    token_ids: Sequence[int], logprobs: Mapping[int, SampledToken]
) -> list[SampledToken | None]:
    """Return results, None for rows without a token (-1).

    Args:
        token_ids: One per row.
        logprobs: Complete results of the rows that want log-probabilities: row |-> token.
    """
    return [
        (logprobs.get(row) or SampledToken(token_id=token_id)) if token_id >= 0 else None
        for row, token_id in enumerate(token_ids)
    ]


def filter_logits(
    logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, max_k: int
) -> Tensor:
    """Set the logits that top-k, top-p and min-p exclude to -inf, in place; return the tensor.

    Args:
        logits_RV: float32, already divided by the temperature.
        top_k_R: int64 >= 1; the size of the vocabulary: off.
        top_p_R: float64 in (0, 1]; 1: off.
        min_p_R: float64 in [0, 1]; 0: off.
        max_k: The largest of top_k_R, on the host.
    """
    ranked = _largest(logits_RV, max_k)  # [R, max_k], descending
    rank = torch.arange(max_k, device=logits_RV.device)
    is_kept = rank < top_k_R.unsqueeze(1)
    relative = ranked.double() - ranked[:, :1].double()
    masses = (relative.exp() * MASS_UNIT + 0.5).long().masked_fill(~is_kept, 0)
    mass_before = (masses.cumsum(dim=-1) - masses).double()
    target = top_p_R.unsqueeze(1) * masses.sum(dim=-1, keepdim=True).double()
    # top_p = 1 includes a tail whose mass rounds to 0.
    is_kept &= (mass_before < target) | (top_p_R.unsqueeze(1) >= 1)
    is_kept[:, 0] = True
    threshold = ranked.masked_fill(~is_kept, torch.inf).amin(dim=-1, keepdim=True)
    by_min_p = ranked[:, :1].double() + min_p_R.unsqueeze(1).log()
    is_out = (logits_RV < threshold) | (logits_RV < by_min_p)
    return logits_RV.masked_fill_(is_out, -torch.inf)


def logprobs_wanted(draws: Sequence[Draw]) -> dict[int, int]:
    """Return the rows that want logprobs: row |-> number of most probable tokens."""
    return {
        row: draw.params.logprobs
        for row, draw in enumerate(draws)
        if draw.params.logprobs is not None
    }


def logprobs_of(
    logits_RV: Tensor, draws: Sequence[Draw], tokens_R: Tensor
) -> dict[int, SampledToken]:
    """Return the complete results of the rows that want logprobs: row |-> token.

    Args:
        logits_RV: float32, without edits.
        draws: One per row; they say which rows want logprobs.
        tokens_R: Drawn tokens, int64; the result of a row without a token (-1) is meaningless.
    """
    wanted = logprobs_wanted(draws)
    if not wanted:
        return {}
    index = torch.tensor(list(wanted), device=logits_RV.device)
    all_logprobs = logits_RV[index].log_softmax(dim=-1)
    own = all_logprobs.gather(1, tokens_R[index].clamp(min=0).unsqueeze(1)).squeeze(1).tolist()
    top = all_logprobs.topk(min(max(wanted.values()), logits_RV.shape[1]), dim=-1)
    results = {}
    for row, token, logprob, top_ids, top_logprobs in zip(
        wanted,
        tokens_R[index].tolist(),
        own,
        top.indices.tolist(),
        top.values.tolist(),
        strict=True,
    ):
        count = wanted[row]
        results[row] = SampledToken(
            token_id=token,
            logprob=logprob,
            top_logprobs=tuple(zip(top_ids[:count], top_logprobs[:count], strict=True)),
        )
    return results


def _draw_randomly(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    params = [draw.params for draw in draws]

    def upload(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)

    temperature_R = upload([each.temperature for each in params])
    # The maximum is subtracted first: a small temperature cannot overflow.
    scaled = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R.unsqueeze(1)
    scaled = scaled.float()
    top_k = [min(each.top_k or vocab_size, vocab_size) for each in params]
    if any(
        k < vocab_size or each.top_p < 1 or each.min_p > 0
        for k, each in zip(top_k, params, strict=True)
    ):
        filter_logits(
            scaled,
            torch.tensor(top_k).to(device, non_blocking=True),
            upload([each.top_p for each in params]),
            upload([each.min_p for each in params]),
            max(top_k),
        )
    bases = torch.tensor([draw_base(draw.seed, draw.position) for draw in draws]).to(device)
    return (scaled + gumbel_noise(bases, vocab_size)).argmax(dim=-1)


def _largest(logits_RV: Tensor, count: int) -> Tensor:
    if count < logits_RV.shape[1]:
        return logits_RV.topk(count, dim=-1).values
    return logits_RV.sort(dim=-1, descending=True).values


def _edit(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits with penalties and bans: the same tensor if there are none, else a copy."""
    entries = logit_entries(draws)
    if entries is None:
        return logits_RV

    def upload(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(logits_RV.device, non_blocking=True)

    rows_E, tokens_E = upload(entries.rows_E), upload(entries.tokens_E)
    repetition_E = upload(entries.repetition_E)
    values = logits_RV[rows_E, tokens_E]
    repeated = torch.where(values < 0, values * repetition_E, values / repetition_E)
    return logits_RV.index_put((rows_E, tokens_E), repeated - upload(entries.subtract_E))


def _mask(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits with -inf for tokens that are not allowed: the same tensor if all are."""
    words_R = allowed_rows([draw.allowed for draw in draws])
    if words_R is None:
        return logits_RV
    bits_RV = np.unpackbits(words_R.view(np.uint8), axis=1, bitorder="little")
    is_allowed = torch.from_numpy(bits_RV[:, : logits_RV.shape[1]]).bool()
    return logits_RV.masked_fill(~is_allowed.to(logits_RV.device), -torch.inf)
