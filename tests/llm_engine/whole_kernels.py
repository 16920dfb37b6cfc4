"""Computes with torch, for all rows at once, what kernels between attention and sampling do.

For tests of when an engine launches which kernels: the interpreter takes most of their time for
these, program by program. What the kernels compute is shown by tests/attn_kernels. As there, a
row's bits do not depend on the rest of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from triton.runtime.jit import JITFunction

from attn_kernels.append.bodies import rotate_and_append_kernel
from attn_kernels.elementwise.bodies import rms_norm_kernel
from attn_kernels.linear.bodies import linear_kernel
from attn_kernels.linear.plan import GATE_GROUP
from llm_engine.operations import TorchOperations


def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *_: int, **options: Any) -> None:
    product = (x.float()[:, None] * weight.float()).sum(-1)  # of a row alone, as no torch.mm
    if options["HAS_BIAS"]:
        product += bias
    if options["IS_GATED"]:
        gate, up = product.to(out.dtype).unflatten(1, (-1, 2, GATE_GROUP)).unbind(2)
        product = (silu(gate) * up).flatten(1)
    out.copy_(product)


def _rms_norm(
    out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, *numbers: Any, **options: Any
) -> None:
    eps = numbers[-1]
    if options["HAS_RESIDUAL"]:
        out.copy_(TorchOperations().add_rms_norm(x, residual, weight, eps))
    else:
        out.copy_(TorchOperations().rms_norm(x, weight, eps))


def _rotate_and_append(
    q_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    append_page: Tensor,
    append_offset: Tensor,
    k_scale: None,
    v_scale: None,
    layer: int,
    *_: int,
    **options: Any,
) -> None:
    assert k_scale is v_scale is None, "no pages of fp8"
    cos, sin = cos[positions, None], sin[positions, None]
    assert 2 * cos.shape[-1] == options["HEAD_DIM"], "all dimensions are rotated"

    def rotated(x: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    q_out.copy_(rotated(q))
    is_written = append_page >= 0
    slots = append_page[is_written], append_offset[is_written]
    for index, new in enumerate((rotated(k), v)):
        pages[:, layer, index].transpose(1, 2)[slots] = new[is_written]


WHOLE_KERNELS: dict[JITFunction, Callable[..., None]] = {
    linear_kernel: _linear,
    rms_norm_kernel: _rms_norm,
    rotate_and_append_kernel: _rotate_and_append,
}
