"""The read-only kernel: what it copies, counted on the host, and how it compiles for Hopper."""

import re

import numpy as np
import pytest
import torch

from benchmarks.attention_cases import DECODE_CASES
from benchmarks.bench import HEAD_DIM, NUM_KV_HEADS, page_tables
from benchmarks.read_floor import ReadFloor, box_rows, box_table
from tests.attn_kernels.sm90 import compile_launch, launches_of

PAGE_SIZES = (16, 32, 64, 128)
MAX_SHARED_BYTES = 227 * 1024


def empty_pages(num_pages: int, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (num_pages, 2, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("case", DECODE_CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_case_is_copied_whole_and_nothing_but_the_rest_of_each_last_box(
    case: str, page_size: int, dtype: torch.dtype
):
    kv_lens = DECODE_CASES[case]
    num_pages = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    page_ids = torch.arange(num_pages, dtype=torch.int32)

    floor = ReadFloor(empty_pages(num_pages, page_size, dtype), kv_lens, page_ids)

    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    case_bytes = sum(kv_lens) * token_bytes
    if "lognormal" in case:
        rest_bytes = len(kv_lens) * (box_rows(page_size) - 1) * token_bytes
        assert case_bytes < floor.num_bytes <= min(case_bytes + rest_bytes, 1.02 * case_bytes)
    else:
        assert floor.num_bytes == case_bytes


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_boxes_are_those_of_the_tokens_of_each_request_in_its_own_pages(page_size: int):
    kv_lens = [1, 200, 64, 128, 65]
    pages = empty_pages(40, page_size, torch.bfloat16)
    indptr, page_ids = page_tables(torch.empty_like(pages, device="cpu"), kv_lens)

    boxes = box_table(kv_lens, page_ids.numpy(), page_size)

    rows = box_rows(page_size)
    of_pool = []  # the token slots that boxes cover, box by box
    for box in boxes:
        page, place = divmod(int(box), page_size // rows)
        of_pool.append(page * page_size + place * rows)
    wanted = [
        int(page_ids[int(indptr[request]) + token // page_size]) * page_size + token % page_size
        for request, kv_len in enumerate(kv_lens)
        for token in range(0, kv_len, rows)
    ]
    assert of_pool == wanted
    assert boxes.dtype == np.int32


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_the_kernel_fills_shared_memory_by_the_copy_engine_and_spills_nothing(
    page_size: int, dtype: torch.dtype
):
    pages = torch.empty(4, 2, 2, NUM_KV_HEADS, page_size, HEAD_DIM, dtype=dtype)
    floor = ReadFloor(pages, [3 * page_size + 1], torch.arange(4, dtype=torch.int32))
    (launch,) = launches_of(lambda: floor.run(1))

    compiled = compile_launch(launch)

    assert 180 * 1024 < compiled.shared_bytes <= MAX_SHARED_BYTES
    assert compiled.spill_bytes == 0
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", compiled.ptx))
    row_bytes = HEAD_DIM * dtype.itemsize
    assert copies == 2 * row_bytes // 128, "keys and values, each in columns of 128 bytes"
    expected = re.findall(r"expect_tx\S* _, \[%r\d+\], (\d+)", compiled.ptx)
    assert expected == [str(2 * box_rows(page_size) * row_bytes)]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_run_ends_with_more_and_with_fewer_boxes_than_are_in_flight(page_size: int):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    shape = (256, 2, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
    pages = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    page_ids = torch.arange(256, dtype=torch.int32, device="cuda")

    for kv_len in (1, 5 * page_size, 256 * page_size):
        ReadFloor(pages, [kv_len], page_ids).run(1)

    torch.cuda.synchronize()
