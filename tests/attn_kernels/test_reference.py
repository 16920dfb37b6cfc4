"""References have the signatures of their launchers, and give the same in their place."""

import inspect
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.cascade import reference as cascade_reference
from attn_kernels.cascade.launch import CascadeAttention
from attn_kernels.decode import reference as decode_reference
from attn_kernels.decode.launch import DecodeAttention
from attn_kernels.elementwise.launch import rms_norm
from attn_kernels.linear.launch import gated_linear, linear
from attn_kernels.pages.launch import copy_between, copy_pages, gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from attn_kernels.prefill import reference as prefill_reference
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.sampling import reference as sampling_reference
from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import LogitEdits
from tests.attn_kernels.paged_case import PagedCase, make_case, shared_case
from tests.attn_kernels.sampling_case import logits_of_kind, random_rows, row_params
from tests.attn_kernels.shared_tables import grow
from tests.attn_kernels.small_tiles import CASCADE, DECODE, PREFILL
from tests.attn_kernels.tolerance import assert_within_twice

FUNCTIONS: list[Callable[..., object]] = [
    rotate_and_append,
    rms_norm,
    gather_pages,
    scatter_pages,
    copy_pages,
    copy_between,
    digest_pages,
    linear,
    gated_linear,
]
METHODS = [
    getattr(kind, name)
    for kind in (PrefillAttention, DecodeAttention, CascadeAttention)
    for name in ("__init__", "plan", "run")
] + [
    CascadeAttention.plan_next_step,
    TokenSampler.__init__,
    TokenSampler.sample,
    TokenSampler.logprobs,
]
# What says how a kernel computes, and not what
HOW = {
    "tile",
    "capacity",
    "decode_tile",
    "shape",
    "rule",
    "is_exact",
    "num_programs",
    "memory_of",
    "max_shared_slots",
    "num_shared_slots",
    "first_private",
}
ATOL = 4e-6  # as in paged_case.py


def reference_of(launcher: Callable[..., object]) -> ModuleType:
    """Return the reference module beside a launcher."""
    return import_module(launcher.__module__.rpartition(".")[0] + ".reference")


@pytest.mark.parametrize(
    "launcher", [*FUNCTIONS, *METHODS], ids=lambda each: getattr(each, "__qualname__", "")
)
def test_a_reference_has_the_parameters_of_its_launcher(launcher: Callable[..., object]):
    parameters = inspect.signature(launcher).parameters.values()
    twin = attrgetter(launcher.__qualname__)(reference_of(launcher))

    assert list(inspect.signature(twin).parameters.values()) == [
        each for each in parameters if each.name not in HOW
    ]


def states(case: PagedCase, num_rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return queries of which the case's tokens are the last, and where a run writes."""
    shape = (num_rows, *case.q.shape[1:])
    q = torch.full(shape, float("nan"), device=case.q.device)
    q[-case.q.shape[0] :] = case.q
    lse = torch.full(shape[:2], 7.0, device=case.q.device)
    return q, {"out": torch.full_like(q, 7.0), "lse": lse}


def assert_alike(run: Callable[[Any], dict[str, Tensor]], launcher: Any, twin: Any) -> None:
    """Compare what two classes write, rows that are not planned included."""
    actual, expected = run(launcher), run(twin)
    for name, tensor in expected.items():
        assert (tensor[0] == 7.0).all()
        assert_within_twice(actual[name], tensor, tensor, atol=ATOL)


def test_prefill(device: str):
    case = make_case([3, 0, 20], [3, 9, 65], device=device)

    def run(kind: Any) -> dict[str, Tensor]:
        attention = kind(
            case.pages,
            num_qo_heads=case.num_qo_heads,
            scale=case.scale,
            sliding_window=30,
            soft_cap=2.0,
        )
        attention.plan([20, 3], [65, 3], first_rows=[4, 1], requests=[2, 0])
        q, written = states(case, 24)
        attention.run(q, case.layer, case.kv_page_indptr, case.kv_page_indices, **written)
        return written

    assert_alike(run, partial(PrefillAttention, **PREFILL), prefill_reference.PrefillAttention)


def test_decode(device: str):
    case = make_case([1, 1, 1], [20, 33, 5], device=device)
    starts = case.kv_page_indptr.tolist()

    def run(kind: Any) -> dict[str, Tensor]:
        attention = kind(case.pages, **case.options, sliding_window=30, soft_cap=2.0)
        attention.plan([5, 33], rows=[3, 2], table_starts=[starts[2], starts[1]])
        q, written = states(case, 4)
        attention.run(q, case.layer, case.kv_page_indices, **written)
        return written

    launcher = partial(DecodeAttention, **DECODE)
    assert_alike(run, launcher, decode_reference.DecodeAttention)


def test_cascade(device: str):
    tables = grow(3, [0], [5], [0] * 3, [1, 9, 3], page_size=8)
    case = shared_case(tables, device=device)
    fewer = [kv_len - (kv_len % 8 != 1) for kv_len in case.kv_lens]  # in the same pages

    def run(kind: Any) -> dict[str, Tensor]:
        attention = kind(case.pages, **case.options, sliding_window=45, soft_cap=2.0)
        attention.plan(fewer, tables.starts, tables.indices, rows=[3, 1, 2])
        attention.plan_next_step(case.kv_lens)
        q, written = states(case, 4)
        attention.run(q, case.layer, case.kv_page_indices, **written)
        return written

    def launcher(*arguments: Any, **options: Any) -> CascadeAttention:
        attention = CascadeAttention(*arguments, **options, **CASCADE)
        attention.model = attention.model.sharing_all()
        return attention

    assert_alike(run, launcher, cascade_reference.CascadeAttention)


def test_sampling(device: str):
    rows = random_rows(12, 301, seed=9)
    logits = logits_of_kind("ties", 12, 301).to(device)
    logits[3] = -torch.inf
    generator = torch.Generator().manual_seed(1)
    mask = torch.randint(-(2**31), 2**31, (12, 10), generator=generator, dtype=torch.int32)
    entries = torch.randperm(12 * 301, generator=generator)[:500]
    edits = LogitEdits(
        rows=torch.where(entries % 7 == 0, -1, entries // 301).int().to(device),
        tokens=(entries % 301).int().to(device),
        repetition=(1 + torch.rand(500, generator=generator)).to(device),
        subtract=torch.rand(500, generator=generator).to(device),
    )

    def run(kind: Any) -> tuple[Tensor, ...]:
        sampler = kind(vocab_size=301, max_rows=12, device=device)
        out = torch.full((12,), 7, dtype=torch.int32, device=device)
        params = row_params(rows, device)
        tokens = sampler.sample(logits, params, mask=mask.to(device), edits=edits, out=out)
        return tokens, *astuple(sampler.logprobs(logits[4:], tokens[4:], 9))

    actual, expected = run(TokenSampler), run(sampling_reference.TokenSampler)

    torch.testing.assert_close(actual, expected)
    assert (actual[0] >= 0).tolist() == [row != 3 for row in range(12)]


@pytest.mark.parametrize("kv_len", [0, 20])
def test_a_new_output_has_the_dtype_of_the_queries(kv_len: int):
    case = make_case([1], [kv_len], dtype=torch.bfloat16)
    attention = decode_reference.DecodeAttention(case.pages, **case.options)
    attention.plan(case.kv_lens)

    out = attention.run(case.q, case.layer, case.kv_page_indices)

    assert torch.equal(out, case.expected()[0].bfloat16())
