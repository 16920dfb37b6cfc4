"""Builds ragged paged batches whose every unused element is NaN, and states the tolerance."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_kernels.prefill.reference import paged_attention
from tests.attn_kernels.shared_tables import SharedTables
from tests.attn_kernels.tolerance import assert_within_twice

# dtype, head_dim, page_size: each value of each at least once
HALF_PRECISION = [
    (torch.float16, 16, 8),
    (torch.bfloat16, 16, 8),
    (torch.bfloat16, 64, 128),
    (torch.float16, 96, 32),
    (torch.bfloat16, 128, 16),
    (torch.float16, 256, 64),
    (torch.bfloat16, 256, 1),
]

LSE_ATOL = 2e-5  # of a log-sum-exp up to 16


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    q: Tensor  # [tokens, num_qo_heads, head_dim]
    pages: Tensor  # [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    layer: int
    page_tables: list[list[int]]
    qo_lens: list[int]
    kv_lens: list[int]
    scale: float
    k_scale: Tensor | None = None  # [num_layers, num_kv_heads], for pages of fp8
    v_scale: Tensor | None = None
    # None: those of the page tables.
    kv_page_indptr: Tensor = None
    kv_page_indices: Tensor = None

    def __post_init__(self) -> None:
        if self.kv_page_indptr is None:
            ends = torch.tensor([0, *(len(table) for table in self.page_tables)]).cumsum(0)
            indptr = ends.to(dtype=torch.int32, device=self.q.device)
            object.__setattr__(self, "kv_page_indptr", indptr)
        if self.kv_page_indices is None:
            pages = [page for table in self.page_tables for page in table]
            indices = torch.tensor(pages, dtype=torch.int32, device=self.q.device)
            object.__setattr__(self, "kv_page_indices", indices)

    @property
    def num_qo_heads(self) -> int:
        return self.q.shape[1]

    @property
    def options(self) -> dict[str, Any]:
        """What decode and cascade attention over these pages are made with."""
        return {
            "num_qo_heads": self.num_qo_heads,
            "scale": self.scale,
            "max_requests": len(self.kv_lens),
            "max_kv_tokens": sum(self.kv_lens),
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }

    @property
    def table_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the requests' entries begin in the page table, and the table, on the host."""
        return self.kv_page_indptr[:-1].cpu().numpy(), self.kv_page_indices.cpu().numpy()

    def expected(
        self, sliding_window: int | None = None, soft_cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        return paged_attention(
            self.q,
            self.pages,
            self.layer,
            self.page_tables,
            self.qo_lens,
            self.kv_lens,
            scale=self.scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def only(self, request: int) -> "PagedCase":
        """The same request alone, in the same pages."""
        first = sum(self.qo_lens[:request])
        return self._changed(
            q=self.q[first : first + self.qo_lens[request]].contiguous(),
            page_tables=[self.page_tables[request]],
            qo_lens=[self.qo_lens[request]],
            kv_lens=[self.kv_lens[request]],
        )

    def moved(self, seed: int = 1) -> "PagedCase":
        """The same contents in other physical pages."""
        generator = torch.Generator().manual_seed(seed)
        new_ids = torch.randperm(self.pages.shape[0], generator=generator)
        pages = torch.empty_like(self.pages)
        pages[new_ids.to(self.pages.device)] = self.pages
        tables = [[int(new_ids[page]) for page in table] for table in self.page_tables]
        return self._changed(pages=pages, page_tables=tables)

    def chunk(self, ends: Sequence[int], lengths: Sequence[int]) -> "PagedCase":
        """For each request its tokens [end - length, end), as a chunk over what is before."""
        parts, tables = [], []
        first = 0
        for qo_len, kv_len, end, length, table in zip(
            self.qo_lens, self.kv_lens, ends, lengths, self.page_tables, strict=True
        ):
            start = first + end - length - (kv_len - qo_len)
            parts.append(self.q[start : start + length])
            tables.append(table[: -(-end // self.pages.shape[4])])
            first += qo_len
        return self._changed(
            q=torch.cat(parts), page_tables=tables, qo_lens=list(lengths), kv_lens=list(ends)
        )

    def _changed(self, **changes: Any) -> "PagedCase":
        """The same case with changes, among them other page tables."""
        return replace(self, kv_page_indptr=None, kv_page_indices=None, **changes)


def make_case(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_layers: int = 2,
    spare_pages: int = 3,
    seed: int = 0,
) -> PagedCase:
    """Random contents in shuffled pages; other layers, unused pages and tail rows are NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    num_pages = sum(counts) + spare_pages
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    page_shape = (num_layers, 2, num_kv_heads, page_size, head_dim)
    pages = torch.full((num_pages, *page_shape), float("nan"), dtype=dtype, device=device)
    layer = num_layers - 1
    tables = []
    for count, kv_len in zip(counts, kv_lens, strict=True):
        table, shuffled = shuffled[:count], shuffled[count:]
        tables.append(table)
        for index, page in enumerate(table):
            used = min(page_size, kv_len - index * page_size)
            shape = (2, num_kv_heads, used, head_dim)
            contents = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            pages[page, layer, :, :, :used] = contents.to(dtype)
    shape = (sum(qo_lens), num_qo_heads, head_dim)
    q = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)
    return PagedCase(
        q=q,
        pages=pages,
        layer=layer,
        page_tables=tables,
        qo_lens=list(qo_lens),
        kv_lens=list(kv_lens),
        scale=head_dim**-0.5,
    )


def quantized(case: PagedCase, q_dtype: torch.dtype) -> PagedCase:
    """The same contents in fp8, with clearly other scales for seven heads in a row, keys' before
    values'; other layers' are NaN."""
    largest = case.pages[:, case.layer].nan_to_num(0.0).float().abs().amax(dim=(0, 3, 4))
    largest = largest.clamp(min=1e-3)  # [2, num_kv_heads]
    num_kv_heads = case.pages.shape[3]
    # Many heads repeat the scales: with larger ones all of a head would round to zero.
    spread = 1.5 ** (torch.arange(2 * num_kv_heads, device=largest.device) % 7).reshape(2, -1)
    scales = torch.full((2, case.pages.shape[1], num_kv_heads), float("nan"))
    scales = scales.to(largest.device)
    scales[:, case.layer] = largest / 448 * spread
    whole = scales[:, case.layer, :, None, None]  # [2, num_kv_heads, 1, 1]
    pages = (case.pages.float() / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return replace(case, q=case.q.to(q_dtype), pages=pages, k_scale=scales[0], v_scale=scales[1])


def shared_case(
    tables: SharedTables,
    *,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """One new token for each request of a forest; what no request's tokens fill is NaN."""
    generator = torch.Generator(device=device).manual_seed(seed)
    page_size = tables.page_size
    num_pages = int(tables.indices.max()) + 2
    shape = (num_pages, 2, 2, num_kv_heads, page_size, head_dim)
    pages = torch.full(shape, float("nan"), dtype=dtype, device=device)
    used = torch.zeros(num_pages, dtype=torch.int64)
    for table, kv_len in zip(tables.tables, tables.kv_lens, strict=True):
        for index, page in enumerate(table):
            used[page] = max(int(used[page]), min(page_size, kv_len - index * page_size))
    for page, count in enumerate(used.tolist()):
        contents = torch.randn(
            (2, num_kv_heads, count, head_dim), generator=generator, device=device
        )
        pages[page, 1, :, :, :count] = contents.to(dtype)
    num_requests = len(tables.kv_lens)
    q = torch.randn((num_requests, num_qo_heads, head_dim), generator=generator, device=device)
    return PagedCase(
        q=q.to(dtype),
        pages=pages,
        layer=1,
        page_tables=tables.tables,
        qo_lens=[1] * num_requests,
        kv_lens=tables.kv_lens,
        scale=head_dim**-0.5,
    )


def assert_close(
    actual: Tensor,
    case: PagedCase,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    rows: Sequence[int] | None = None,
    lse: Tensor | None = None,
) -> None:
    """Accept twice the error of attention in the case's dtype, plus a small absolute part.

    Each request by itself: one with few tokens has larger outputs, and so errors, than a long one.
    The absolute part is a few units in the last place of float32: the device's exp2 has two. A
    log-sum-exp may have no more than such a part, since products of what a case holds, whatever
    its dtype, round in float32 only.

    Args:
        actual: The output.
        case: What it was computed from.
        sliding_window, soft_cap: Likewise.
        rows: The case's tokens that the output's rows are of; None is all in order.
        lse: If given, the log-sum-exp of the same rows; -inf where, and only where, a query has no
            keys.
    """
    expected, expected_lse = case.expected(sliding_window, soft_cap)
    eager = _eager(case, sliding_window, soft_cap)
    chosen = list(range(len(expected)) if rows is None else rows)
    assert len(actual) == len(chosen)
    ends = list(accumulate(case.qo_lens))
    requests = torch.tensor([bisect_right(ends, row) for row in chosen], device=actual.device)
    for request in requests.unique():
        mine = requests == request
        each = (tensor[chosen][mine] for tensor in (eager, expected))
        assert_within_twice(actual[mine], *each, atol=4e-6)
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse[chosen], atol=LSE_ATOL, rtol=0)


def _eager(case: PagedCase, sliding_window: int | None, soft_cap: float | None) -> Tensor:
    """Attention as a few torch operations in the case's own dtype."""
    outs = []
    first = 0
    group = case.num_qo_heads // case.pages.shape[3]
    for table, qo_len, kv_len in zip(case.page_tables, case.qo_lens, case.kv_lens, strict=True):
        kv = case.pages[table, case.layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len]
        k, v = (each.repeat_interleave(group, dim=0).to(case.q.dtype) for each in kv)
        q = case.q[first : first + qo_len].transpose(0, 1)
        scores = (q @ k.transpose(1, 2)) * case.scale
        if case.k_scale is not None:
            scores = scores * _of_heads(case.k_scale, case)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(kv_len - qo_len, kv_len, device=q.device)[:, None]
        distance = position - torch.arange(kv_len, device=q.device)
        hidden = distance < 0
        if sliding_window is not None:
            hidden = hidden | (distance >= sliding_window)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        out = weights @ v
        if case.v_scale is not None:
            out = out * _of_heads(case.v_scale, case)
        outs.append(out.transpose(0, 1))
        first += qo_len
    return torch.cat(outs)


def _of_heads(scales: Tensor, case: PagedCase) -> Tensor:
    group = case.num_qo_heads // case.pages.shape[3]
    return scales[case.layer].repeat_interleave(group)[:, None, None].to(case.q.dtype)


def primer_pages(page_size: int, device: str) -> tuple[Tensor, list[int], Tensor]:
    """Return a pool with the three tokens of the block-sparse primer, their pages, and values."""
    pages = torch.full((5, 1, 2, 1, page_size, 16), float("nan"), device=device)
    table = [3, 0, 4][: -(-3 // page_size)]
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=device)
    values = torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]], device=device)
    for token in range(3):
        slot = pages[table[token // page_size], 0, :, 0, token % page_size]
        slot.zero_()
        slot[0, :2], slot[1, :2] = keys[token], values[token]
    return pages, table, values
