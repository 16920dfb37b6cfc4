"""Tensors whose elements lie past 2**31, in the interpreter: offsets wrap as on a GPU.

Memory is reserved, and only what a test touches is ever given to it. As much lies before a tensor
as behind its beginning, so that an offset which wraps reads zeros rather than ends the process.
"""

import mmap
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.decode.plan import FIELDS, DecodeItems, plan_decode
from attn_kernels.elementwise.launch import rms_norm
from attn_kernels.linear.launch import linear
from attn_kernels.linear.launch_triton import MANY
from attn_kernels.pages.launch import gather_pages, scatter_pages
from attn_kernels.sampling.launch import TokenSampler
from attn_kernels.sampling.rows import LogitEdits
from tests.attn_kernels.paged_case import PagedCase, assert_close, make_case, quantized, shared_case
from tests.attn_kernels.sampling_case import TINY, Row, draw, row_params
from tests.attn_kernels.shared_tables import grow
from tests.attn_kernels.small_tiles import (
    cascade,
    decode,
    make_cascade,
    make_decode,
    make_prefill,
    prefill,
)
from tests.support.triton_interpreter import interpreted, patched

MAP_NORESERVE = (
    0x4000  # Linux: a host with less memory grants it too; Python 3.11 has no name for it
)
NUM_LAYERS, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 1 << 15, 2, 16, 16
PAGE_ELEMENTS = NUM_LAYERS * 2 * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM
FIRST_FAR_PAGE = 2**31 // PAGE_ELEMENTS
TABLES = grow(3, [0], [2], [0] * 3, [1, 9, 0], page_size=PAGE_SIZE)  # two pages are shared


@pytest.fixture(autouse=True)
def _interpreter() -> Iterator[None]:
    with interpreted():
        yield


def reserved(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Return so many elements past 2**31 others, which are never touched where all is right."""
    num_bytes = (2**31 + num_elements) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    return memory.view(dtype)[2**31 :]


def reserved_like(tensor: Tensor) -> Tensor:
    return reserved(tensor.numel(), tensor.dtype).view(tensor.shape)


def far_of(case: PagedCase) -> PagedCase:
    """The same contents in fp8, in the last layer of pages past 2**31 elements."""
    case = quantized(case, torch.bfloat16)
    num_pages = FIRST_FAR_PAGE + case.pages.shape[0]
    shape = (num_pages, NUM_LAYERS, *case.pages.shape[2:])
    pages = reserved(num_pages * PAGE_ELEMENTS, torch.float8_e4m3fn).view(shape)
    pages[FIRST_FAR_PAGE:, -1] = case.pages[:, case.layer]
    scales = torch.ones(2, NUM_LAYERS, NUM_KV_HEADS)
    scales[:, -1] = torch.stack((case.k_scale[case.layer], case.v_scale[case.layer]))
    return replace(
        case,
        pages=pages,
        layer=NUM_LAYERS - 1,
        page_tables=[[FIRST_FAR_PAGE + page for page in table] for table in case.page_tables],
        kv_page_indices=case.kv_page_indices + FIRST_FAR_PAGE,
        k_scale=scales[0],
        v_scale=scales[1],
    )


@pytest.mark.parametrize("window", [None, 9])
def test_decode(window: int | None):
    shape = {"page_size": PAGE_SIZE, "head_dim": HEAD_DIM, "num_kv_heads": NUM_KV_HEADS}
    case = far_of(make_case([1, 1], [5, 40], **shape))

    assert_close(decode(case, sliding_window=window), case, window)


@pytest.mark.parametrize("window", [None, 9])
def test_prefill(window: int | None):
    shape = {"page_size": PAGE_SIZE, "head_dim": HEAD_DIM, "num_kv_heads": NUM_KV_HEADS}
    case = far_of(make_case([5, 3], [5, 40], **shape))

    assert_close(prefill(case, sliding_window=window), case, window)


def test_cascade():
    case = far_of(shared_case(TABLES, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM))

    assert_close(cascade(case), case)


def far_rows(case: PagedCase) -> tuple[Tensor, list[int]]:
    """The case's queries, of requests of one token, in rows of which all but one are far."""
    num_rows, row_elements = case.q.shape[0], case.q[0].numel()
    rows = [0, *(2**31 // row_elements + row for row in range(1, num_rows))]
    q = reserved((rows[-1] + 1) * row_elements, case.q.dtype).view(-1, *case.q.shape[1:])
    q[rows] = case.q
    return q, rows


def test_rows_of_decode():
    case = make_case([1, 1, 1], [5, 40, 7], dtype=torch.bfloat16)
    q, rows = far_rows(case)
    attention = make_decode(case)
    attention.plan(case.kv_lens, rows=rows)

    out = attention.run(q, case.layer, case.kv_page_indices, out=reserved_like(q))

    assert_close(out[rows], case)


def test_rows_of_prefill():
    case = make_case([1, 1, 1], [5, 40, 7], dtype=torch.bfloat16)
    q, rows = far_rows(case)
    attention = make_prefill(case)
    attention.plan(case.qo_lens, case.kv_lens, first_rows=rows)
    tables = (case.kv_page_indptr, case.kv_page_indices)

    out = attention.run(q, case.layer, *tables, out=reserved_like(q))

    assert_close(out[rows], case)


def test_rows_of_cascade():
    case = shared_case(TABLES, dtype=torch.bfloat16)
    q, rows = far_rows(case)
    attention = make_cascade(case)
    attention.plan(case.kv_lens, TABLES.starts, TABLES.indices, rows=rows)

    out = attention.run(q, case.layer, case.kv_page_indices, out=reserved_like(q))

    assert attention.num_shared_items > 0
    assert_close(out[rows], case)


def test_slots_of_cascade(monkeypatch: pytest.MonkeyPatch):
    case = shared_case(TABLES)
    first_slot = 2**31 // case.q[0].numel()

    def plan_far(*args: Any, **options: Any) -> DecodeItems:
        items = plan_decode(*args, **options)
        items.table[:, [FIELDS.index("first_slot"), FIELDS.index("slot")]] += first_slot
        return replace(items, first_slots=items.first_slots + first_slot)

    monkeypatch.setattr("attn_kernels.decode.launch.plan_decode", plan_far)
    attention = make_cascade(case)
    flat = attention.decode
    num_slots = first_slot + len(flat.partial_acc)
    flat.partial_acc = reserved(num_slots * case.q[0].numel(), torch.float32)
    flat.partial_stats = torch.empty(num_slots, case.num_qo_heads, 3)
    flat._arrivals = torch.zeros(num_slots, NUM_KV_HEADS, dtype=torch.int32)
    attention.plan(case.kv_lens, TABLES.starts, TABLES.indices)

    out = attention.run(case.q, case.layer, case.kv_page_indices)

    assert attention.num_shared_items > 0
    assert_close(out, case)


def test_append():
    num_pages = FIRST_FAR_PAGE + 2
    shape = (num_pages, NUM_LAYERS, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = reserved(num_pages * PAGE_ELEMENTS, torch.float8_e4m3fn).view(shape)
    layer, page, offset = NUM_LAYERS - 1, num_pages - 1, PAGE_SIZE - 1
    k, v = (torch.full((1, NUM_KV_HEADS, HEAD_DIM), value) for value in (2.0, 3.0))

    rotate_and_append(
        *(each.bfloat16() for each in (k, k, v)),
        pages,
        layer,
        cos=torch.ones(1, 4),
        sin=torch.zeros(1, 4),
        positions=torch.zeros(1, dtype=torch.int64),
        append_page=torch.tensor([page]),
        append_offset=torch.tensor([offset]),
        k_scale=torch.ones(NUM_LAYERS, NUM_KV_HEADS),
        v_scale=torch.ones(NUM_LAYERS, NUM_KV_HEADS),
    )

    assert (pages[page, layer, 0, :, offset].float() == 2.0).all()
    assert (pages[page, layer, 1, :, offset].float() == 3.0).all()


def test_rows_of_append():
    num_tokens, stride, size = 3, 2**30, NUM_KV_HEADS * HEAD_DIM
    far = reserved((num_tokens - 1) * stride + 3 * size, torch.bfloat16).as_strided(
        (num_tokens, 3, NUM_KV_HEADS, HEAD_DIM), (stride, size, HEAD_DIM, 1), 2**31
    )
    far.copy_(torch.arange(1, far.numel() + 1).view(far.shape))

    def append(qkv: Tensor) -> tuple[Tensor, Tensor]:
        pages = torch.zeros(1, 1, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16)
        q = rotate_and_append(
            *qkv.unbind(1),
            pages,
            0,
            cos=torch.ones(1, 4),
            sin=torch.zeros(1, 4),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            append_page=torch.zeros(num_tokens, dtype=torch.int64),
            append_offset=torch.arange(num_tokens),
        )
        return q, pages

    for found, wanted in zip(append(far), append(far.clone()), strict=True):
        assert torch.equal(found, wanted)


def test_rows():
    num_rows, size, stride = 3, 16, 2**30
    rows = reserved((num_rows - 1) * stride + size, torch.bfloat16)
    x = rows.as_strided((num_rows, size), (stride, 1), rows.storage_offset())
    x.copy_(torch.arange(1, num_rows * size + 1).view(num_rows, size))
    near = x.clone()

    assert torch.equal(rms_norm(x, near[0], 1e-5), rms_norm(near, near[0], 1e-5))


def test_logits():
    num_rows, vocab_size, stride = 6, 200, 2**30
    far = reserved(5 * stride + vocab_size, torch.bfloat16)
    far = far.as_strided((num_rows, vocab_size), (stride, 1), far.storage_offset())
    near = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    far.copy_(near)
    rows = [
        Row(temperature=0.0),
        Row(top_k=5),
        Row(temperature=2.0, top_p=0.9, seed=1),
        Row(temperature=5.0, top_k=150, top_p=0.99, seed=2),
        Row(min_p=0.1, seed=3),
        Row(temperature=3.0, seed=4),
    ]
    sampler = TokenSampler(vocab_size=vocab_size, max_rows=num_rows, device="cpu", shape=TINY)
    tokens = torch.arange(num_rows, dtype=torch.int32)

    assert draw(far, rows, shape=TINY) == draw(near, rows, shape=TINY)
    for found, wanted in zip(
        astuple(sampler.logprobs(far, tokens, 3)),
        astuple(sampler.logprobs(near, tokens, 3)),
        strict=True,
    ):
        assert torch.equal(found, wanted)


def test_edited_logits():
    num_rows, vocab_size, stride = 3, 4, 2**30
    far = reserved((num_rows - 1) * stride + vocab_size, torch.float32)
    far = far.as_strided((num_rows, vocab_size), (stride, 1), far.storage_offset())
    far.copy_(torch.tensor([2.0, 1.9, 0.0, 0.0]))
    before = far.clone()
    rows = torch.arange(num_rows, dtype=torch.int32)
    ones = torch.ones(num_rows)
    edits = LogitEdits(rows=rows, tokens=rows * 0, repetition=2 * ones, subtract=0 * ones)
    sampler = TokenSampler(vocab_size=vocab_size, max_rows=num_rows, device="cpu", shape=TINY)
    params = row_params([Row(temperature=0.0)] * num_rows, "cpu")

    assert sampler.sample(far, params, edits=edits).tolist() == [1, 1, 1]
    assert torch.equal(far, before)


def test_pages_of_a_pool():
    page_words = 16
    ids = torch.tensor([0, 2**27, 2**27 + 1], dtype=torch.int32)
    pool = reserved((2**27 + 2) * page_words, torch.int32).view(-1, page_words)
    staging = torch.arange(1, len(ids) * page_words + 1, dtype=torch.int32).view(-1, page_words)
    gathered = torch.zeros_like(staging)

    scatter_pages(staging, ids, pool)
    gather_pages(pool, ids, gathered)

    assert torch.equal(pool[ids.long()], staging)
    assert torch.equal(gathered, staging)


@pytest.fixture
def _only_last_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a launch only the last program runs: all would touch gigabytes."""
    kernel: Any = JITFunction
    run_all = kernel.run

    def run_last(self: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        last = TensorHandle(np.array([grid[0] - 1], dtype=np.int32), tl.int32)
        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", lambda *_: last)
        run_all(self, *args, grid=(1,), **options)

    with patched(run=run_last, call=kernel.__call__):
        yield


@pytest.mark.usefixtures("_only_last_program")
def test_pages_of_staging():
    page_words, num_pages = 1024, 2**21 + 1
    pool = torch.arange(1, 2 * page_words + 1, dtype=torch.int32).view(2, page_words)
    staging = reserved(num_pages * page_words, torch.int32).view(num_pages, page_words)
    ids = torch.zeros(num_pages, dtype=torch.int32)
    ids[-1] = 1

    gather_pages(pool, ids, staging)
    scatter_pages(staging, torch.zeros_like(ids), pool)

    assert torch.equal(staging[-1], pool[1])
    assert torch.equal(pool[0], pool[1])


@pytest.mark.usefixtures("_only_last_program")
@pytest.mark.parametrize(("num_rows", "num_out"), [(2**24 + 64, 128), (64, 2**24 + 64)], ids=str)
def test_linear(monkeypatch: pytest.MonkeyPatch, num_rows: int, num_out: int):
    tile, num_in = MANY[-1], 128
    x, weight, out = (
        reserved(rows * columns, torch.float16).view(rows, columns)
        for rows, columns in ((num_rows, num_in), (num_out, num_in), (num_rows, num_out))
    )
    x[-tile.block_m :], weight[-tile.block_n :] = 1.0, 0.5
    monkeypatch.setattr("attn_kernels.linear.launch.torch.empty", lambda *_, **__: out)

    linear(x, weight, tile=tile)

    assert (out[-tile.block_m :, -tile.block_n :] == 64.0).all()
