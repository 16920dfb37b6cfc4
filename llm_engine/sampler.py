"""Draws tokens from logits on the device that holds them; results come back in one go.

Order, per row, each step only where asked for: penalties, banned tokens, temperature, top-k, top-p
over the rest renormalized, min-p relative to the most probable, then Gumbel-max. The filters give
a threshold on the logit: a token as probable as the last one kept is kept too, so that the set
does not depend on how ties are sorted. Greedy rows take the most probable token, of several the
lowest id. Nothing depends on other rows.

Legend: R rows (one per draw), V vocabulary, E edited logits (entries of penalties or bans).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_engine.gumbel import draw_base, gumbel_noise
from llm_engine.sampling import Draw, SampledToken

# Logits that are filtered and drawn at a time: each float64 or int64 temporary is 32 MiB.
CHUNK_ELEMENTS = 1 << 22


def sample(logits_RV: Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """Draw one token per row; blocks until the tokens are on the host.

    Args:
        logits_RV: Any float dtype; not modified.
        draws: What to draw from each row.
    """
    logits = logits_RV.float()
    edited = _ban(_penalize(logits, draws), draws)
    tokens = edited.argmax(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if draw.params.temperature != 0]
    rows_at_once = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for first in range(0, len(random_rows), rows_at_once):
        rows = random_rows[first : first + rows_at_once]
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = _draw_randomly(edited[index], [draws[row] for row in rows])
    logprobs = _logprobs(logits, draws, tokens)
    return [
        logprobs.get(row) or SampledToken(token_id=token)
        for row, token in enumerate(tokens.tolist())
    ]


def filter_logits(
    logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, max_k: int
) -> Tensor:
    """Set the logits that top-k, top-p and min-p exclude to -inf, in place; return the tensor.

    Args:
        logits_RV: float32, already divided by the temperature.
        top_k_R: int64 >= 1; the size of the vocabulary is "off".
        top_p_R: float64 in (0, 1]; 1 is "off".
        min_p_R: float64 in [0, 1]; 0 is "off".
        max_k: The largest of top_k_R, on the host.
    """
    ranked = _largest(logits_RV, max_k)  # [R, max_k], descending
    rank = torch.arange(max_k, device=logits_RV.device)
    is_kept = rank < top_k_R.unsqueeze(1)
    probs = ranked.double().masked_fill(~is_kept, -torch.inf).softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # Rounding must not exclude a tail that top_p = 1 includes.
    is_kept &= (mass_before < top_p_R.unsqueeze(1)) | (top_p_R.unsqueeze(1) >= 1)
    is_kept[:, 0] = True
    threshold = ranked.masked_fill(~is_kept, torch.inf).amin(dim=-1, keepdim=True)
    by_min_p = ranked[:, :1].double() + min_p_R.unsqueeze(1).log()
    is_out = (logits_RV < threshold) | (logits_RV < by_min_p)
    return logits_RV.masked_fill_(is_out, -torch.inf)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Penalties:
    """One entry per (row, token) that any penalty changes."""

    rows_E: Tensor  # int64
    tokens_E: Tensor  # int64
    repetition_E: Tensor  # float32
    subtract_E: Tensor  # float32, presence and frequency together


def _penalize(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits with penalties: the same tensor if there are none, else a copy."""
    entries = _penalties(draws, logits_RV.device)
    if entries is None:
        return logits_RV
    values = logits_RV[entries.rows_E, entries.tokens_E]
    repeated = torch.where(values < 0, values * entries.repetition_E, values / entries.repetition_E)
    return logits_RV.index_put((entries.rows_E, entries.tokens_E), repeated - entries.subtract_E)


def _penalties(draws: Sequence[Draw], device: torch.device) -> _Penalties | None:
    rows, tokens, repetition, subtract = [], [], [], []
    for row, draw in enumerate(draws):
        params = draw.params
        if not params.has_penalties:
            continue
        output, counts = np.unique(
            np.asarray(draw.output_token_ids, dtype=np.int64), return_counts=True
        )
        seen = np.union1d(np.asarray(draw.prompt_token_ids, dtype=np.int64), output)
        subtracted = np.zeros(len(seen))
        subtracted[np.searchsorted(seen, output)] = (
            params.presence_penalty + params.frequency_penalty * counts
        )
        rows.append(np.full(len(seen), row))
        tokens.append(seen)
        repetition.append(np.full(len(seen), params.repetition_penalty))
        subtract.append(subtracted)
    if not rows:
        return None

    def upload(parts: Sequence[npt.NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)

    return _Penalties(
        rows_E=upload(rows),
        tokens_E=upload(tokens),
        repetition_E=upload(repetition).float(),
        subtract_E=upload(subtract).float(),
    )


def _ban(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return logits with banned tokens at -inf: the same tensor if there are none, else a copy."""
    banned = [
        (row, token_id) for row, draw in enumerate(draws) for token_id in draw.banned_token_ids
    ]
    if not banned:
        return logits_RV
    rows_E, tokens_E = torch.tensor(banned).to(logits_RV.device, non_blocking=True).unbind(1)
    minus_infinity = torch.tensor(-torch.inf, device=logits_RV.device)
    return logits_RV.index_put((rows_E, tokens_E), minus_infinity)


def _logprobs(
    logits_RV: Tensor, draws: Sequence[Draw], tokens_R: Tensor
) -> dict[int, SampledToken]:
    """Return the complete results of the rows that want logprobs: row |-> token."""
    wanted = {
        row: draw.params.logprobs
        for row, draw in enumerate(draws)
        if draw.params.logprobs is not None
    }
    if not wanted:
        return {}
    index = torch.tensor(list(wanted), device=logits_RV.device)
    all_logprobs = logits_RV[index].log_softmax(dim=-1)
    own = all_logprobs.gather(1, tokens_R[index].unsqueeze(1)).squeeze(1).tolist()
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
