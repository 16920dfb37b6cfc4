"""Cases of attention for benchmarks.kernels: decode, its reads alone, cascade, prefill.

A name that ends in "@fp8" is the case of the same name on a pool of e4m3 with a scale for each
layer and head, and queries in bfloat16.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.decode.launch import DecodeAttention
from attn_kernels.prefill.launch import PrefillAttention
from benchmarks.bench import (
    FP8_SCALE,
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_QO_HEADS,
    Bench,
    Timing,
    page_tables,
)
from benchmarks.cascade_cases import TWO_LEVELS, Forest, cascade_cases
from benchmarks.read_floor import ReadFloor

SCALE = HEAD_DIM**-0.5
REST_S = 0.5
PAGE_SETS = 5  # of decode: the same launch takes up to 7 % longer on some pages than on others
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

Run = Callable[[Bench, int], list[Timing]]  # takes the page size


def lognormal_lens(seed: int, num_requests: int = 128) -> list[int]:
    """Lengths of requests, as the targets' authors drew them."""
    rng = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    return [min(65_536, max(64, int(rng.lognormvariate(7, 1.2)))) for _ in range(num_requests)]


# name -> all tokens of each request
DECODE_CASES: dict[str, list[int]] = {
    **{
        f"decode/{batch}x{context}": [context] * batch
        for batch, context in (
            (1, 1024),
            (1, 4096),
            (1, 16384),
            (8, 1024),
            (8, 4096),
            (32, 1024),
            (64, 1024),
            (128, 1024),
            (256, 1024),
            (64, 4096),
            (128, 8192),
        )
    },
    **{f"decode/lognormal{seed}": lognormal_lens(seed) for seed in (1, 2, 3)},
    "decode/skew": [65_536] + [512] * 63,
    "decode/skew4": [32_768] * 4 + [1024] * 60,
}
# Without targets: for plan() of 256 requests, some of which are cut
RAGGED_CASES = {
    "decode/256xlognormal": lognormal_lens(4, 256),
    "decode/256xskew": [65_536] + [512] * 255,
}

# name -> (new tokens, all tokens) of each request
PREFILL_CASES: dict[str, list[tuple[int, int]]] = {
    "prefill/8192": [(8192, 8192)],
    "prefill/4x2048": [(2048, 2048)] * 4,
    "prefill/2048@34816": [(2048, 34_816)],
    "prefill/8x512@4096": [(512, 4096)] * 8,
    "prefill/16384": [(16_384, 16_384)],
}

TARGET_CASCADES = [f"cascade/{batch},{shared},{own}" for batch, shared, own in TWO_LEVELS]


def attention_cases() -> Iterator[tuple[str, Run]]:
    """Yield cases by name, each with the function that runs it; nothing is launched here."""
    for case, kv_lens in (DECODE_CASES | RAGGED_CASES).items():
        read, compact, fp8 = case.replace("decode/", "read/"), f"{case}@compact", f"{case}@fp8"
        yield case, partial(run_decode, case, kv_lens)
        yield read, partial(run_read, read, kv_lens)
        yield compact, partial(run_decode, compact, kv_lens, is_compact=True)
        yield fp8, partial(run_decode, fp8, kv_lens, dtype=FP8)
        yield f"{read}@fp8", partial(run_read, f"{read}@fp8", kv_lens, dtype=FP8)
    for case, forest in cascade_cases():
        yield case, partial(run_cascade, case, forest)
        yield f"{case}@fp8", partial(run_cascade, f"{case}@fp8", forest, dtype=FP8)
        if case in TARGET_CASCADES:
            compact, inexact = f"{case}@compact", f"{case}@inexact"
            yield compact, partial(run_cascade, compact, forest, is_compact=True)
            yield inexact, partial(run_cascade, inexact, forest, is_exact=False)
    for case, lens in PREFILL_CASES.items():
        compact, sustained = f"{case}@compact", f"{case}@sustained"
        yield case, partial(run_prefill, case, lens)
        yield compact, partial(run_prefill, compact, lens, is_compact=True)
        yield sustained, partial(run_prefill, sustained, lens, rest_s=0.0)
        yield f"{case}@fp8", partial(run_prefill, f"{case}@fp8", lens, dtype=FP8)


def run_decode(
    case: str,
    kv_lens: Sequence[int],
    bench: Bench,
    page_size: int,
    *,
    is_compact: bool = False,
    dtype: torch.dtype = BF16,
) -> list[Timing]:
    """Time flat decode attention, over several sets of random pages."""
    num_tokens = sum(kv_lens) + page_size * len(kv_lens)
    pages = bench.pool(num_tokens, page_size, is_compact=is_compact, dtype=dtype)
    scale = kv_scale(pages)
    attention = DecodeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=len(kv_lens),
        max_kv_tokens=sum(kv_lens),
        k_scale=scale,
        v_scale=scale,
    )
    q = queries(len(kv_lens), bench.device)
    out = torch.empty_like(q)
    plan_us = bench.host_us(lambda: attention.plan(kv_lens))
    layer = pages.shape[1] // 2
    tables = [page_tables(pages, kv_lens, seed)[1] for seed in range(PAGE_SETS)]
    launches = [partial(attention.run, q, layer, indices, out=out) for indices in tables]
    timing = bench.time_over(case, launches)
    tbps = sum(kv_lens) * _token_bytes(pages) / timing.us / 1e6
    return [replace(timing, tbps=tbps, plan_us=plan_us)]


def run_read(
    case: str,
    kv_lens: Sequence[int],
    bench: Bench,
    page_size: int,
    *,
    dtype: torch.dtype = BF16,
) -> list[Timing]:
    """Time reading the keys and values of a decode case, in the same sets of pages."""
    num_tokens = sum(kv_lens) + page_size * len(kv_lens)
    pages = bench.pool(num_tokens, page_size, dtype=dtype)
    tables = [page_tables(pages, kv_lens, seed)[1] for seed in range(PAGE_SETS)]
    floors = [ReadFloor(pages, kv_lens, indices) for indices in tables]
    timing = bench.time_over(case, [partial(each.run, pages.shape[1] // 2) for each in floors])
    return [replace(timing, tbps=floors[0].num_bytes / timing.us / 1e6)]


def run_cascade(
    case: str,
    forest: Forest,
    bench: Bench,
    page_size: int,
    *,
    is_compact: bool = False,
    dtype: torch.dtype = BF16,
    is_exact: bool = True,
) -> list[Timing]:
    """Time one forest as planned, and flat; "tbps" counts shared keys and values once.

    Without `is_exact` flat is not timed again: it is the same.
    """
    kv_lens = forest.kv_lens()
    num_tokens = forest.num_distinct_tokens()
    pages = bench.pool(
        num_tokens + page_size * len(kv_lens), page_size, is_compact=is_compact, dtype=dtype
    )
    page_ids = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(0))
    starts, indices = forest.page_tables(page_ids.tolist(), page_size)
    scale = kv_scale(pages)
    attention = CascadeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=len(kv_lens),
        max_kv_tokens=sum(kv_lens),
        k_scale=scale,
        v_scale=scale,
        is_exact=is_exact,
    )
    kv_page_indices = torch.from_numpy(indices).to(bench.device)
    q = queries(len(kv_lens), bench.device)
    out = torch.empty_like(q)
    layer = pages.shape[1] // 2
    plan_us = bench.host_us(lambda: attention.plan(kv_lens, starts, indices))
    estimate = attention.plan(kv_lens, starts, indices)
    next_step_plan_us = bench.host_us(lambda: attention.plan_next_step(kv_lens))
    cascade = bench.time(
        case, lambda: attention.run(q, layer, kv_page_indices, out=out), also_with_clean_l2=True
    )
    num_bytes = num_tokens * _token_bytes(pages)
    timing = replace(
        cascade,
        tbps=num_bytes / cascade.us / 1e6,
        plan_us=plan_us,
        next_step_plan_us=next_step_plan_us,
        estimated_us=estimate.cascade_us,
        num_shared_items=attention.num_shared_items,
    )
    if not is_exact:
        return [timing]
    attention.flat.plan(np.asarray(kv_lens), table_starts=starts)
    flat = bench.time(
        f"{case}@flat",
        lambda: attention.flat.run(q, layer, kv_page_indices, out=out),
        also_with_clean_l2=True,
    )
    return [
        replace(timing, vs_flat=timing.us / flat.us),
        replace(flat, tbps=num_bytes / flat.us / 1e6, estimated_us=estimate.flat_us),
    ]


def run_prefill(
    case: str,
    lens: Sequence[tuple[int, int]],
    bench: Bench,
    page_size: int,
    *,
    rest_s: float = REST_S,
    is_compact: bool = False,
    dtype: torch.dtype = BF16,
) -> list[Timing]:
    """Time prefill attention after the GPU has rested for some seconds."""
    qo_lens, kv_lens = [qo for qo, _ in lens], [kv for _, kv in lens]
    num_tokens = sum(kv_lens) + page_size * len(kv_lens)
    pages = bench.pool(num_tokens, page_size, is_compact=is_compact, dtype=dtype)
    scale = kv_scale(pages)
    attention = PrefillAttention(
        pages, num_qo_heads=NUM_QO_HEADS, scale=SCALE, k_scale=scale, v_scale=scale
    )
    indptr, indices = page_tables(pages, kv_lens)
    q = queries(sum(qo_lens), bench.device)
    out = torch.empty_like(q)
    plan_us = bench.host_us(lambda: attention.plan(qo_lens, kv_lens))
    bench.rest(rest_s)
    timing = bench.time(case, lambda: attention.run(q, 0, indptr, indices, out=out))
    scores = sum(qo * (kv - qo) + qo * (qo + 1) / 2 for qo, kv in lens)
    flops = 4 * NUM_QO_HEADS * HEAD_DIM * scores
    return [replace(timing, tflops=flops / timing.us / 1e6, plan_us=plan_us)]


def kv_scale(pages: Tensor) -> Tensor | None:
    """Return the factor of both keys and values, one for each layer and head."""
    if pages.dtype != FP8:
        return None
    return torch.full((pages.shape[1], pages.shape[3]), FP8_SCALE, device=pages.device)


def queries(
    num_rows: int,
    device: torch.device,
    *,
    num_qo_heads: int = NUM_QO_HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """Return random queries."""
    return torch.randn(num_rows, num_qo_heads, head_dim, dtype=dtype, device=device)


def _token_bytes(pages: Tensor) -> int:
    """Return the bytes of a token's keys and values in one layer."""
    return 2 * NUM_KV_HEADS * HEAD_DIM * pages.element_size()
