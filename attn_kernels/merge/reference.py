"""Reference of the merge of attention states."""

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join states over disjoint keys, [n, tokens, heads, head_dim] and natural lse."""
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse.isinf(), 0.0))[..., None]
    contributes = weights > 0
    out = torch.where(contributes, outs.float(), 0.0) * weights
    return out.sum(0), lse
