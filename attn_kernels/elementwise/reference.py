"""Reference of the norm between matrix products."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Norm rows; with a residual, add it first and store the sum there."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)
