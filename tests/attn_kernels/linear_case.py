"""Operands of linear layers, and checks of their products against the reference."""

import torch

from attn_kernels.linear import reference
from tests.attn_kernels.tolerance import assert_within_twice

ATOL = 6e-5  # 16 units in the last place of float32, for sums of some hundred products up to 64
MAX_SHARED_BYTES = 227 * 1024


def randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Compare with torch, whose sums have another order."""
    eager = torch.nn.functional.linear(x, weight, bias)
    exact_bias = None if bias is None else bias.float()
    expected = reference.linear(x.float(), weight.float(), exact_bias)
    assert_within_twice(out, eager, expected, atol=ATOL)


def check_gated(out: torch.Tensor, product: torch.Tensor) -> None:
    """Compare with what the columns of an ungated product give, 8 gates and 8 others in turns."""
    expected = reference.gated(product.float())
    assert_within_twice(out, reference.gated(product), expected, atol=ATOL)


def operands(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and weights of a kind, on a GPU."""
    x, weight = randn("cuda", torch.float32, 543, 4096), randn("cuda", torch.float32, 4096, 4096)
    if kind == "wide":  # exponents far apart: any other order of sums shows
        x *= torch.exp2(torch.randint(-6, 7, x.shape, device="cuda").float())
        weight *= torch.exp2(torch.randint(-6, 7, weight.shape, device="cuda").float())
    if kind == "cancelling":
        x[:, 1::2] = -x[:, ::2]
        weight[:, 1::2] = weight[:, ::2] * 1.01
    return (x / 64).to(dtype), (weight / 64).to(dtype)
