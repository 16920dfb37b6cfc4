"""Reference of the operations between matrix products."""

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


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    silu = torch.nn.functional.silu(gate.float()).to(gate.dtype)
    return (silu.float() * up.float()).to(gate.dtype)
