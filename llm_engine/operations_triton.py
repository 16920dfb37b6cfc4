"""A decoder's operations on Triton kernels: a row's bits do not depend on the rest of the batch."""

from collections.abc import Iterable

from torch import Tensor

from attn_kernels.elementwise.launch import rms_norm, silu_mul
from attn_kernels.linear.launch import linear, shipped_tiles
from llm_engine.weights import DecoderWeights, LinearWeights


class TritonOperations:
    """Implements `llm_engine.operations.Operations`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, residual=residual)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up)


def load_linear_kernels(weights: DecoderWeights) -> None:
    """Launch the linear layer on all shapes with all tiles, so that no pass loads one later."""
    for each in _shapes(weights):
        row = each.weight.new_zeros((1, each.weight.shape[1]))
        for tile in shipped_tiles(row, each.weight):
            linear(row, each.weight, each.bias, tile=tile)


def _shapes(weights: DecoderWeights) -> Iterable[LinearWeights]:
    layer = weights.layers[0]
    head = LinearWeights(weight=weights.lm_head, bias=None)
    return layer.qkv, layer.output, layer.gate_up, layer.down, head
