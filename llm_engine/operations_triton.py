"""A decoder's operations on Triton kernels: a row's bits do not depend on the rest of the batch."""

from torch import Tensor

from attn_kernels.elementwise.launch import rms_norm
from attn_kernels.linear.launch import gated_linear, linear, shipped_tiles
from llm_engine.weights import DecoderWeights, LinearWeights


class TritonOperations:
    """Implements `llm_engine.operations.Operations`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, residual=residual)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gated_linear(x, weight, bias)


def load_linear_kernels(weights: DecoderWeights) -> None:
    """Launch the linear layer on all shapes with all tiles, so that no pass loads one later."""
    layer = weights.layers[0]
    head = LinearWeights(weight=weights.lm_head, bias=None)
    for launch, each in (
        *((linear, each) for each in (layer.qkv, layer.output, layer.down, head)),
        (gated_linear, layer.gate_up),
    ):
        row = each.weight.new_zeros((1, each.weight.shape[1]))
        for tile in shipped_tiles(row, each.weight):
            launch(row, each.weight, each.bias, tile=tile)
