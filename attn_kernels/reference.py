"""A slow function or class per launcher, in torch and float32: what each kernel must compute.

Each has the signature of its launcher: the same parameters in the same order, of the same kinds and
with the same defaults. Left out is only what says how a kernel does it: tiles, programs, where keys
are cut, what another kernel has done before, a prefix tree that is known. Nothing is checked.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_kernels.checks import Integers


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


class PrefillAttention:
    """What `attn_kernels.prefill.PrefillAttention` computes: `paged_attention` of planned rows."""

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self._page_size = pages.shape[4]
        self._attend = partial(
            paged_attention,
            pages=pages,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def plan(
        self,
        qo_lens: Integers,
        kv_lens: Integers,
        *,
        first_rows: Integers | None = None,
        requests: Integers | None = None,
    ) -> None:
        """Keep the batch."""
        self._qo_lens, self._kv_lens = _ints(qo_lens), _ints(kv_lens)
        packed = accumulate(self._qo_lens, initial=0)
        first = packed if first_rows is None else _ints(first_rows)
        self._rows = [
            row + token
            for row, qo_len in zip(first, self._qo_lens, strict=False)
            for token in range(qo_len)
        ]
        self._requests = range(len(self._kv_lens)) if requests is None else _ints(requests)

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indptr: Tensor,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer; write the planned rows of out, rounded to its dtype, and of lse."""
        starts, page_ids = kv_page_indptr.tolist(), kv_page_indices.tolist()
        tables = [
            page_ids[starts[request] :][: -(-kv_len // self._page_size)]
            for request, kv_len in zip(self._requests, self._kv_lens, strict=True)
        ]
        planned_out, planned_lse = self._attend(
            q[self._rows],
            layer=layer,
            page_tables=tables,
            qo_lens=self._qo_lens,
            kv_lens=self._kv_lens,
        )
        if out is None:
            out = torch.empty_like(q)
        out[self._rows] = planned_out.to(out.dtype)
        if lse is not None:
            lse[self._rows] = planned_lse
        return out


class DecodeAttention:
    """What `attn_kernels.decode.DecodeAttention` computes: prefill of one token per request."""

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        max_requests: int,
        max_kv_tokens: int,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self._page_size = pages.shape[4]
        self._prefill = PrefillAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def plan(
        self,
        kv_lens: Integers,
        *,
        rows: Integers | None = None,
        table_starts: Integers | None = None,
    ) -> None:
        """Keep the batch."""
        counts = (-(-kv_len // self._page_size) for kv_len in _ints(kv_lens))
        starts = accumulate(counts, initial=0) if table_starts is None else _ints(table_starts)
        self._table_starts = torch.tensor(list(starts))
        self._prefill.plan([1] * len(kv_lens), kv_lens, first_rows=rows)

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer; write the planned rows of out, rounded to its dtype, and of lse."""
        return self._prefill.run(q, layer, self._table_starts, kv_page_indices, out=out, lse=lse)


class CascadeAttention:
    """What `attn_kernels.cascade.CascadeAttention` computes: decode, whatever is shared."""

    def __init__(
        self,
        pages: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        max_requests: int,
        max_kv_tokens: int,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self._decode = DecodeAttention(
            pages,
            num_qo_heads=num_qo_heads,
            scale=scale,
            max_requests=max_requests,
            max_kv_tokens=max_kv_tokens,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def plan(
        self,
        kv_lens: Integers,
        table_starts: npt.NDArray[np.integer],
        page_indices: npt.NDArray[np.integer],
        *,
        rows: Integers | None = None,
    ) -> None:
        """Keep the batch; its pages are read from what `run` is given."""
        self._decode.plan(kv_lens, rows=rows, table_starts=table_starts)
        self._rows, self._table_starts = rows, table_starts

    def plan_next_step(self, kv_lens: Integers) -> None:
        """Keep the batch with new lengths."""
        self._decode.plan(kv_lens, rows=self._rows, table_starts=self._table_starts)

    def run(
        self,
        q: Tensor,
        layer: int,
        kv_page_indices: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attend in one layer; write the planned rows of out, rounded to its dtype, and of lse."""
        return self._decode.run(q, layer, kv_page_indices, out=out, lse=lse)


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
    target[page_ids.long()] = source[: len(page_ids)].to(target.device)


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


def _ints(values: Integers) -> list[int]:
    return [int(value) for value in values]
