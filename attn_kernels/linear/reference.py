"""Reference of a linear layer, gated or not."""

from torch import Tensor
from torch.nn.functional import silu

from attn_kernels.linear.plan import GATE_GROUP


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, rounded once."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return silu(gates) * the others, of a product whose columns are 8 of each in turns."""
    return gated(linear(x, weight, bias))


def gated(product: Tensor) -> Tensor:
    """Gate a product, [num_rows, 2 * num_out], with each step rounded to its dtype."""
    gate, up = product.view(len(product), -1, 2, GATE_GROUP).unbind(2)
    return (silu(gate.float()).to(gate.dtype).float() * up.float()).to(gate.dtype).flatten(1)
