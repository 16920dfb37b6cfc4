"""Reference of sampling, by sorting; engines without these kernels draw with it, too.

Order per row, each step only if requested: edits (penalties and bans), the mask of a constraint,
temperature, top-k, top-p over the renormalized rest, min-p relative to the most probable, then
Gumbel-max. The filters give a threshold on the logit: a token as probable as the last one kept is
kept, too, so that the set does not depend on the order of ties. (Of tokens that tie with the k-th,
top-p counts only as many as make k.) Masses are integers in units of 2**-40 of the most probable
token's, so that sums have one value on any device. Greedy rows take the most probable token, and
the lowest id among ties. Nothing depends on other rows.

Legend: R rows (one per draw), V vocabulary.
"""

from dataclasses import fields

import torch
from torch import Tensor

from attn_kernels.sampling.reference_gumbel import draw_bases, gumbel_noise
from attn_kernels.sampling.rows import LogitEdits, Logprobs, RowParams

# Logits that are filtered and drawn at a time: each float64 or int64 temporary is 32 MiB.
CHUNK_ELEMENTS = 1 << 22
MASS_UNIT = 2.0**40
# Exponentials of a row that are summed in float32: so few that torch gives them to one thread, and
# the bits of a lone row are those that it has in a batch.
TILE = 1 << 14


class TokenSampler:
    """Reference of `launch.TokenSampler`; it has no buffers."""

    def __init__(self, *, vocab_size: int, max_rows: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows

    def sample(
        self,
        logits: Tensor,
        params: RowParams,
        *,
        mask: Tensor | None = None,
        edits: LogitEdits | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draw one token per row."""
        edited_RV = logits.float()
        if edits is not None:
            edited_RV = edit_logits(edited_RV, edits)
        if mask is not None:
            edited_RV = _mask(edited_RV, mask)
        tokens = edited_RV.argmax(dim=-1)
        random_rows = params.temperature.nonzero().squeeze(1)
        rows_at_once = max(1, CHUNK_ELEMENTS // self.vocab_size)
        for first in range(0, len(random_rows), rows_at_once):
            rows = random_rows[first : first + rows_at_once]
            tokens[rows] = _draw_randomly(edited_RV[rows], _params_of(params, rows))
        tokens[~edited_RV.amax(dim=-1).isfinite()] = -1
        return tokens.int() if out is None else out.copy_(tokens)

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Return log-probabilities of one token per row and of the most probable ones."""
        logits = logits.float()
        lse = _log_sum_exp(logits)
        count = min(num_top, self.vocab_size)
        best = _most_probable(logits, count)
        values = logits.gather(1, best)
        top_tokens = tokens.new_full((len(logits), num_top), -1)
        top_tokens[:, :count] = best.masked_fill(values == -torch.inf, -1)
        top = logits.new_full((len(logits), num_top), -torch.inf)
        top[:, :count] = values - lse
        own = logits.gather(1, tokens.clamp(min=0).long().unsqueeze(1))
        chosen = (own - lse).float().squeeze(1).masked_fill(tokens < 0, torch.nan)
        return Logprobs(chosen=chosen, top=top, top_tokens=top_tokens)


def edit_logits(logits_RV: Tensor, edits: LogitEdits) -> Tensor:
    """Return edited logits; the given ones stay as they are."""
    is_entry = edits.rows >= 0
    places = edits.rows[is_entry], edits.tokens[is_entry]
    values, repetition = logits_RV[places], edits.repetition[is_entry]
    repeated = torch.where(values < 0, values * repetition, values / repetition)
    return logits_RV.index_put(places, repeated - edits.subtract[is_entry])


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


def _mask(logits_RV: Tensor, mask: Tensor) -> Tensor:
    """Return logits with -inf for tokens that are not allowed."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, device=mask.device, dtype=torch.int32) & 1
    is_allowed = bits.flatten(1)[:, : logits_RV.shape[1]].bool()
    return logits_RV.masked_fill(~is_allowed, -torch.inf)


def _draw_randomly(logits_RV: Tensor, params: RowParams) -> Tensor:
    vocab_size = logits_RV.shape[1]
    # The maximum is subtracted first: a small temperature cannot overflow.
    scaled = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    scaled = (scaled / params.temperature.unsqueeze(1)).float()
    is_off = (params.top_k <= 0) | (params.top_k > vocab_size)
    top_k = params.top_k.masked_fill(is_off, vocab_size)
    if ((top_k < vocab_size) | (params.top_p < 1) | (params.min_p > 0)).any():
        filter_logits(scaled, top_k, params.top_p, params.min_p, int(top_k.max()))
    bases = draw_bases(params.seeds, params.positions)
    return (scaled + gumbel_noise(bases, vocab_size)).argmax(dim=-1)


def _log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, [R, 1], float64; the sums of tiles are float32."""
    largest = logits_RV.amax(dim=-1, keepdim=True)
    tiles = torch.split(logits_RV, TILE, dim=-1)
    sums = torch.cat([(tile - largest).exp_().sum(dim=-1, keepdim=True) for tile in tiles], dim=-1)
    return sums.double().sum(dim=-1, keepdim=True).log() + largest


def _most_probable(logits_RV: Tensor, count: int) -> Tensor:
    """Return the ids of the largest logits, [R, count], falling; of equal ones the lowest first."""
    best = logits_RV.topk(min(count + 1, logits_RV.shape[1]), dim=-1)
    ids = best.indices[:, :count]
    has_ties = (best.values[:, 1:] == best.values[:, :-1]).any(dim=-1)
    if has_ties.any():  # topk orders equal values arbitrarily
        bits = (logits_RV[has_ties] + 0.0).view(torch.int32)  # of -0.0 as of 0.0
        ranks = bits ^ ((bits >> 31) & 0x7FFF_FFFF)  # in the order of the floats
        all_ids = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        ids[has_ties] = ((ranks.long() << 32) - all_ids).topk(count, dim=-1).indices
    return ids


def _largest(logits_RV: Tensor, count: int) -> Tensor:
    if count < logits_RV.shape[1]:
        return logits_RV.topk(count, dim=-1).values
    return logits_RV.sort(dim=-1, descending=True).values


def _params_of(params: RowParams, rows: Tensor) -> RowParams:
    return RowParams(**{each.name: getattr(params, each.name)[rows] for each in fields(params)})
