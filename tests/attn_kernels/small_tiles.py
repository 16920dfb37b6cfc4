"""Attention over a case's pages, with tiles that are small enough for the interpreter."""

from typing import Any

from torch import Tensor

from attn_kernels.cascade.launch import CascadeAttention, SharedTile
from attn_kernels.decode.launch import DecodeAttention, DecodeTile
from attn_kernels.decode.plan import SplitRule
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.launch_triton import PrefillTile
from tests.attn_kernels.paged_case import PagedCase

RULE = SplitRule(split_len=16, splits_per_segment=2)
DECODE = {
    "rule": RULE,
    "tile": DecodeTile(block_n=16, num_warps=4, num_stages=2, programs_per_sm=1),
    "num_programs": 3,
}
PREFILL = {"tile": PrefillTile(block_m=16, block_n=16, num_warps=4, num_stages=2)}
CASCADE = {
    "rule": RULE,
    "decode_tile": DECODE["tile"],
    "tile": SharedTile(block_m=16, num_warps=4, num_stages=2, programs_per_sm=1),
    "num_programs": 3,
}


def run(attention: DecodeAttention | CascadeAttention, case: PagedCase, **options: Any) -> Tensor:
    return attention.run(case.q, case.layer, case.kv_page_indices, **options)


def make_prefill(case: PagedCase, **options: Any) -> PrefillAttention:
    options = PREFILL | {"k_scale": case.k_scale, "v_scale": case.v_scale} | options
    return PrefillAttention(case.pages, num_qo_heads=case.num_qo_heads, scale=case.scale, **options)


def prefill(case: PagedCase, *, lse: Tensor | None = None, **options: Any) -> Tensor:
    attention = make_prefill(case, **options)
    attention.plan(case.qo_lens, case.kv_lens)
    tables = (case.kv_page_indptr, case.kv_page_indices)
    return attention.run(case.q, case.layer, *tables, lse=lse)


def make_decode(case: PagedCase, **options: Any) -> DecodeAttention:
    return DecodeAttention(case.pages, **case.options, **DECODE | options)


def decode(case: PagedCase, *, lse: Tensor | None = None, **options: Any) -> Tensor:
    attention = make_decode(case, **options)
    attention.plan(case.kv_lens)
    return run(attention, case, lse=lse)


def make_cascade(case: PagedCase, **options: Any) -> CascadeAttention:
    """Return attention that reads each shared prefix once, whatever it costs."""
    attention = CascadeAttention(case.pages, **case.options, **CASCADE | options)
    attention.model = attention.model.sharing_all()
    return attention


def cascade(case: PagedCase, **options: Any) -> Tensor:
    attention = make_cascade(case, **options)
    attention.plan(case.kv_lens, *case.table_arrays)
    assert attention.num_shared_items > 0
    return run(attention, case)
