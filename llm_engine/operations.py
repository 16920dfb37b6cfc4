"""The operations of a decoder between attention calls, in torch or in own kernels.

Implementations: `TorchOperations` here (any device, the reference) and
`operations_triton.TritonOperations` (CUDA, or Triton's interpreter in tests), whose rows have the
same bits in any batch.
"""

from typing import Protocol

from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from attn_kernels.linear.plan import GATE_GROUP


class Operations(Protocol):
    """Tensors are two-dimensional, and inputs are not changed, unless stated otherwise."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias for x [rows, num_in] and weight [num_out, num_in]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm the last dimension and multiply it by weight; any leading dimensions."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual in place, and return the rms_norm of the sum."""
        ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return silu(gate) * up, [rows, num_out], of two products of x, [rows, num_in].

        Rows of the weight, [2 * num_out, num_in], are GATE_GROUP of gate, then of up, in turns.
        """
        ...


class TorchOperations:
    """Implements Operations with torch, which picks its kernels by the size of the batch."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = linear(x, weight, bias)
        turns = product.view(len(x), len(weight) // (2 * GATE_GROUP), 2, GATE_GROUP)
        gate, up = turns.unbind(2)
        return (silu(gate) * up).flatten(1)
