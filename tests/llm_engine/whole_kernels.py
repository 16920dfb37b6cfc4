"""Computes with torch, for all rows at once, what kernels between attention and a token do.

For tests of when an engine launches which kernels: the interpreter takes most of their time for
these, program by program. What the kernels compute is shown by tests/attn_kernels. As there, a
row's bits do not depend on the rest of the batch. Of the kernels that together draw tokens, the
last one does all.
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
from attn_kernels.sampling.bodies import choose_kernel, group_max_kernel
from attn_kernels.sampling.bodies_bins import (
    choose_window_kernel,
    count_bins_kernel,
    draw_kernel,
    finish_kernel,
)
from attn_kernels.sampling.bodies_logprobs import logprobs_kernel
from attn_kernels.sampling.reference import TokenSampler
from attn_kernels.sampling.rows import RowParams
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


def _nothing(*_: Any, **_options: Any) -> None:
    pass


def _draw_tokens(tokens: Tensor, *args: Any, HAS_MASK: bool, **_: Any) -> None:
    logits, mask, temperature, top_k, top_p, min_p, seeds, positions = args[6:14]
    params = RowParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
    )
    _sampler_of(logits).sample(logits, params, mask=mask if HAS_MASK else None, out=tokens)


def _logprobs(
    chosen: Tensor, top: Tensor, top_tokens: Tensor, tokens: Tensor, *args: Any, **_: Any
) -> None:
    logits, num_top = args[3], args[-1]
    found = _sampler_of(logits).logprobs(logits, tokens, num_top)
    chosen.copy_(found.chosen)
    top.copy_(found.top)
    top_tokens.copy_(found.top_tokens)


def _sampler_of(logits: Tensor) -> TokenSampler:
    num_rows, vocab_size = logits.shape
    return TokenSampler(vocab_size=vocab_size, max_rows=num_rows, device=logits.device)


WHOLE_KERNELS: dict[JITFunction, Callable[..., None]] = {
    linear_kernel: _linear,
    rms_norm_kernel: _rms_norm,
    rotate_and_append_kernel: _rotate_and_append,
    group_max_kernel: _nothing,
    choose_kernel: _nothing,
    count_bins_kernel: _nothing,
    choose_window_kernel: _nothing,
    draw_kernel: _nothing,
    finish_kernel: _draw_tokens,
    logprobs_kernel: _logprobs,
}
