import pytest
import torch

from attn_kernels.elementwise import reference
from attn_kernels.elementwise.launch import rms_norm
from tests.attn_kernels.tolerance import assert_within_twice

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A few units in the last place of float32: for values up to 16, and for products up to 256
NORM_ATOL = 4e-6


def randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 576])
def test_rms_norm(device: str, dtype: torch.dtype, size: int):
    x, weight = randn(device, dtype, 3, size), randn(device, dtype, size, seed=1)

    out = rms_norm(x, weight, 1e-5)

    eager = reference.rms_norm(x, weight, 1e-5)  # rounds the normed row and the product
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    assert_within_twice(out, eager, expected, atol=NORM_ATOL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_first_and_keeps_the_sum(device: str, dtype: torch.dtype):
    x, weight = randn(device, dtype, 3, 100), randn(device, dtype, 100, seed=1)
    residual = randn(device, dtype, 3, 100, seed=2)
    eager_residual, exact_residual = residual.clone(), residual.clone().float()

    normed = rms_norm(x, weight, 1e-5, residual=residual)

    eager = reference.rms_norm(x, weight, 1e-5, residual=eager_residual)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5, residual=exact_residual)
    assert_within_twice(normed, eager, expected, atol=NORM_ATOL)
    assert torch.equal(residual, eager_residual)
