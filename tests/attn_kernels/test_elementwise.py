import pytest
import torch

from attn_kernels import reference
from attn_kernels.elementwise import rms_norm, silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 576])
def test_rms_norm(device: str, dtype: torch.dtype, size: int):
    x, weight = randn(device, dtype, 3, size), randn(device, dtype, size, seed=1)

    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_first_and_keeps_the_sum(device: str, dtype: torch.dtype):
    x, weight = randn(device, dtype, 3, 100), randn(device, dtype, 100, seed=1)
    residual = randn(device, dtype, 3, 100, seed=2)
    expected_residual = residual.clone()

    normed = rms_norm(x, weight, 1e-5, residual=residual)

    expected = reference.rms_norm(x, weight, 1e-5, residual=expected_residual)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(residual, expected_residual)
    if device == "cuda":  # the interpreter cuts bfloat16 off where a device rounds
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_of_the_halves_of_one_projection(device: str, dtype: torch.dtype):
    gate, up = (4 * randn(device, dtype, 3, 2 * 1100)).chunk(2, dim=1)

    torch.testing.assert_close(silu_mul(gate, up), reference.silu_mul(gate, up))


def test_silu_of_extreme_gates_is_finite(device: str):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device)

    out = silu_mul(gate, torch.ones_like(gate))

    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))
