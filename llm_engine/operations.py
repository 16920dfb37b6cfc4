"""What a decoder computes between attention calls, as torch or as own kernels.

Implementations: `TorchOperations` here (any device, the reference) and
`operations_triton.TritonOperations` (CUDA, or Triton's interpreter in tests), whose rows have the
same bits in any batch.
"""

from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


class Operations(Protocol):
    """Two-dimensional where not said otherwise; inputs are not changed unless it says so."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias for x [rows, num_in] and weight [num_out, num_in]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last dimension and multiply it by weight; any leading dimensions."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in its place, and return what rms_norm makes of the sum."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, size], contiguous."""
        ...


class TorchOperations:
    """Implements Operations with torch, which picks its kernels by the size of the batch."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate) * up
