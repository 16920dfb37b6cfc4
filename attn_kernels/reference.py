"""One slow function per launcher, in torch and float32: what each kernel must compute."""

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    pages: Tensor,
    layer: int,
    page_tables: Sequence[Sequence[int]],
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each request's last tokens; decode is the case of one token each.

    Args:
        q: [sum of qo_lens, num_qo_heads, head_dim].
        pages: [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim].
        layer: Layer of the pool.
        page_tables: Page ids of each request, in order.
        qo_lens: New tokens of each request.
        kv_lens: All tokens of each request.
        scale: Factor of the scores.
        sliding_window: Number of last tokens that a query sees; None is all.
        soft_cap: If given, a score s becomes soft_cap * tanh(s / soft_cap).
        k_scale, v_scale: What keys and values of a pool of fp8 are multiplied by,
            [num_layers, num_kv_heads].

    Returns:
        Output [tokens, num_qo_heads, head_dim] and natural log-sum-exp [tokens, num_qo_heads],
        both float32. A query without keys gives 0 and -inf.
    """
    group = q.shape[1] // pages.shape[3]
    outs, lses = [], []
    row = 0
    for table, qo_len, kv_len in zip(page_tables, qo_lens, kv_lens, strict=True):
        mine = pages[torch.tensor(list(table), dtype=torch.int64, device=q.device), layer].float()
        # [pages, 2, K, page, H] -> [2, K, tokens, H]
        kv = mine.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]
        if k_scale is not None and v_scale is not None:
            kv = kv * torch.stack((k_scale[layer], v_scale[layer]))[:, :, None, None]
        k, v = (each.repeat_interleave(group, dim=0) for each in kv)
        scores = torch.einsum("qnh,nkh->qnk", q[row : row + qo_len].float(), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key = torch.arange(kv_len, device=q.device)
        distance = torch.arange(kv_len - qo_len, kv_len, device=q.device)[:, None] - key[None, :]
        hidden = distance < 0
        if sliding_window is not None:
            hidden = hidden | (distance >= sliding_window)
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
        outs.append(torch.einsum("qnk,nkh->qnh", weights, v))
        lses.append(lse)
        row += qo_len
    return torch.cat(outs), torch.cat(lses)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join states over disjoint keys, [n, tokens, heads, head_dim] and natural lse."""
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse.isinf(), 0.0))[..., None]
    contributes = weights > 0
    out = torch.where(contributes, outs.float(), 0.0) * weights
    return out.sum(0), lse


def rotate_and_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    layer: int,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    append_page: Tensor,
    append_offset: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Rotate in halves, write k and v to their slots of `pages`, return the rotated q.

    Dimensions after those that cos and sin (half as many columns) rotate are copied. With scales,
    [num_layers, num_kv_heads], slots receive k and v divided by them, at most +-448.
    """
    half = cos.shape[1]

    def rotate(x: Tensor) -> Tensor:
        low, high, rest = x.float().tensor_split((half, 2 * half), dim=-1)
        c, s = cos[positions][:, None], sin[positions][:, None]
        return torch.cat((low * c - high * s, high * c + low * s, rest), dim=-1)

    def to_page(x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            x = (x.float() / scale[layer][:, None]).clamp(-448, 448)
        return x.to(pages.dtype)

    written = append_page >= 0
    page, offset = append_page[written], append_offset[written]
    pages[page, layer, 0, :, offset] = to_page(rotate(k)[written], k_scale)
    pages[page, layer, 1, :, offset] = to_page(v[written], v_scale)
    return rotate(q).to(q.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """Norm rows; with a residual, add it first and store the sum there."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    silu = torch.nn.functional.silu(gate.float()).to(gate.dtype)
    return (silu.float() * up.float()).to(gate.dtype)


def gather_pages(pages: Tensor, page_ids: Tensor, staging: Tensor) -> None:
    """Copy pages by id into staging."""
    source = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    target = staging.reshape(staging.shape[0], -1).view(torch.uint8)
    target[: len(page_ids)] = source[page_ids.long()]


def scatter_pages(staging: Tensor, page_ids: Tensor, pages: Tensor) -> None:
    """Copy staging to pages by id."""
    source = staging.reshape(staging.shape[0], -1).view(torch.uint8)
    target = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    target[page_ids.long()] = source[: len(page_ids)]


def copy_pages(pages: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy pages within a pool."""
    flat = pages.reshape(pages.shape[0], -1).view(torch.uint8)
    flat[target_ids.long()] = flat[source_ids.long()]


def digest_pages(words: Tensor, page_ids: Tensor, multipliers: Tensor) -> Tensor:
    """Return the two wrap-around sums of words times multipliers, int64 [n, 2]."""
    chosen = words[page_ids].long()
    return (chosen[:, None] * multipliers[None]).sum(-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, rounded once."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
