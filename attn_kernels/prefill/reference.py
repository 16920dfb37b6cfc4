"""Reference of prefill attention."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

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
    """Reference of `launch.PrefillAttention`: `paged_attention` of planned rows."""

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
        self._qo_lens, self._kv_lens = as_ints(qo_lens), as_ints(kv_lens)
        packed = accumulate(self._qo_lens, initial=0)
        first = packed if first_rows is None else as_ints(first_rows)
        self._rows = [
            row + token
            for row, qo_len in zip(first, self._qo_lens, strict=False)
            for token in range(qo_len)
        ]
        self._requests = range(len(self._kv_lens)) if requests is None else as_ints(requests)

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


def as_ints(values: Integers) -> list[int]:
    """Return Python's integers."""
    return [int(value) for value in values]
