"""The kernels on a GPU in a served model's shapes: accuracy, bits, large offsets, CUDA graphs."""

import pytest
import torch

from attn_kernels.append.launch import rotate_and_append
from attn_kernels.decode.launch import DecodeAttention, decode_tile
from attn_kernels.decode.plan import SplitRule
from attn_kernels.pages.launch import copy_pages, gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from attn_kernels.prefill.launch import PrefillAttention
from attn_kernels.prefill.launch_triton import prefill_tile
from kv_cache.torch_storage import digest_multipliers
from tests.attn_kernels.paged_case import PagedCase, assert_close, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LLAMA_3_8B = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SHAPES = {
    "llama-3-8b": LLAMA_3_8B,
    "qwen2-7b": {"num_qo_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    "phi-3": {"num_qo_heads": 32, "num_kv_heads": 32, "head_dim": 96},
    "gemma": {"num_qo_heads": 16, "num_kv_heads": 8, "head_dim": 256},
    "llama-3-1b": {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 64},
    "llama-3-70b": {"num_qo_heads": 64, "num_kv_heads": 8, "head_dim": 128},
    "group-16": {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 128},
}
KV_LENS = [1, 15, 16, 255, 256, 257, 1023, 1024, 1025, 3000]


def cuda_case(qo_lens: list[int], kv_lens: list[int], **shape: object) -> PagedCase:
    options = {"page_size": 64, "dtype": torch.bfloat16, **LLAMA_3_8B, **shape}
    return make_case(qo_lens, kv_lens, device="cuda", **options)


def decoder(case: PagedCase, **options: object) -> DecodeAttention:
    attention = DecodeAttention(
        case.pages,
        **case.options,
        **options,
    )
    attention.plan(case.kv_lens)
    return attention


def decode(case: PagedCase, *, lse: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    return decoder(case, **options).run(case.q, case.layer, case.kv_page_indices, lse=lse)


def prefill(
    case: PagedCase,
    sliding_window: int | None = None,
    *,
    lse: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    attention = PrefillAttention(
        case.pages,
        num_qo_heads=case.num_qo_heads,
        scale=case.scale,
        sliding_window=sliding_window,
        **options,
    )
    attention.plan(case.qo_lens, case.kv_lens)
    return attention.run(case.q, case.layer, case.kv_page_indptr, case.kv_page_indices, lse=lse)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_decode_and_prefill_are_as_accurate_as_eager_attention(name: str, page_size: int):
    shape = {**SHAPES[name], "page_size": page_size}
    case = cuda_case([1] * len(KV_LENS), KV_LENS, **shape)
    chunks = cuda_case([1, 15, 130, 200, 7], [1, 300, 130, 1000, 40], **shape)
    lse = torch.empty(case.q.shape[:2], device="cuda")
    chunks_lse = torch.empty(chunks.q.shape[:2], device="cuda")

    assert_close(decode(case, lse=lse), case, lse=lse)
    assert_close(decode(case, sliding_window=300), case, 300)
    assert_close(decode(case, soft_cap=1.0), case, soft_cap=1.0)
    assert_close(prefill(chunks, lse=chunks_lse), chunks, lse=chunks_lse)
    assert_close(prefill(chunks, 100), chunks, 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype):
    case = cuda_case([1] * len(KV_LENS), KV_LENS, dtype=dtype)
    chunks = cuda_case([15, 130], [300, 130], dtype=dtype)

    assert_close(decode(case), case)
    assert_close(prefill(chunks), chunks)


@pytest.mark.parametrize("name", SHAPES)
def test_a_request_decodes_to_the_same_bits_in_any_batch_pages_and_run(name: str):
    case = cuda_case([1] * len(KV_LENS), KV_LENS, **SHAPES[name])

    together = decode(case)

    assert torch.equal(decode(case.moved()), together)
    for num_programs in (1, 50, 1000):  # other cuts
        assert torch.equal(decode(case, num_programs=num_programs), together)
    for request in range(len(KV_LENS)):
        assert torch.equal(decode(case.only(request))[0], together[request])
    attention = decoder(case)
    for _ in range(100):
        again = attention.run(case.q, case.layer, case.kv_page_indices)
        assert torch.equal(again, together)


def test_a_long_request_in_many_pieces_has_the_bits_of_one_program():
    case = cuda_case([1], [70_001], page_size=16)

    together = decode(case)

    for num_programs in (1, 20):
        assert torch.equal(decode(case, num_programs=num_programs), together)
    assert_close(together, case)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [None, 200])
def test_a_token_prefills_to_the_same_bits_in_any_chunk_batch_and_pages(
    name: str, window: int | None
):
    case = cuda_case([700, 300], [700, 1300], **SHAPES[name])

    whole = prefill(case, window)

    assert torch.equal(prefill(case.moved(), window), whole)
    assert torch.equal(prefill(case.only(1), window), whole[700:])
    first = prefill(case.chunk([333, 1007], [333, 7]), window)
    second = prefill(case.chunk([700, 1300], [367, 293]), window)
    assert torch.equal(torch.cat((first[:333], second[:367])), whole[:700])
    assert torch.equal(torch.cat((first[333:], second[367:])), whole[700:])


def test_offsets_beyond_2_to_the_31_elements():
    # 3 * 2**31 elements: 300 pages of 2**24 elements and more, the last ones in use.
    pages = torch.zeros(400, 64, 2, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    assert pages[399].storage_offset() > 3 * 2**31
    small = cuda_case([1, 40], [500, 200], page_size=128)
    tables = [[399 - page for page in table] for table in small.page_tables]
    for mine, table in zip(tables, small.page_tables, strict=True):
        pages[mine, 63] = small.pages[table, small.layer]
    far = PagedCase(
        q=small.q,
        pages=pages,
        layer=63,
        page_tables=tables,
        qo_lens=small.qo_lens,
        kv_lens=small.kv_lens,
        kv_page_indptr=small.kv_page_indptr,
        kv_page_indices=399 - small.kv_page_indices,
        scale=small.scale,
    )
    ones = torch.ones(2, 8, 128, dtype=torch.bfloat16, device="cuda")
    staging = torch.zeros(2, *pages.shape[1:], dtype=torch.bfloat16, device="cuda")
    ids = torch.tensor([399, 390], device="cuda")

    for tile in (None, prefill_tile(128, 2)):  # the shipped kernel, that in plain Triton
        assert torch.equal(prefill(far, tile=tile), prefill(small, tile=tile))
    for tile in (None, decode_tile(pages, is_hopper=False)):
        far_out = decode(far.only(0), tile=tile)
        assert torch.equal(far_out, decode(small.only(0), tile=tile))
    gather_pages(pages, ids, staging)
    assert torch.equal(staging, pages[ids])
    words, staged = (each.view(torch.int32).flatten(1) for each in (pages, staging))
    multipliers = digest_multipliers(words.shape[1]).to("cuda")
    digests = digest_pages(words, ids, multipliers)
    assert torch.equal(digests, digest_pages(staged, torch.arange(2, device="cuda"), multipliers))
    copy_pages(pages, ids, ids - 20)
    assert torch.equal(pages[ids - 20], staging)
    pages[ids] = 0
    scatter_pages(staging, ids, pages)
    assert torch.equal(staging, pages[ids])
    rotate_and_append(
        torch.ones(2, 32, 128, dtype=torch.bfloat16, device="cuda"),
        ones,
        ones,
        pages,
        63,
        cos=torch.ones(1, 64, device="cuda"),
        sin=torch.zeros(1, 64, device="cuda"),
        positions=torch.zeros(2, dtype=torch.int64, device="cuda"),
        append_page=ids,
        append_offset=torch.tensor([127, 3], device="cuda"),
    )
    assert (pages[399, 63, :, :, 127] == 1).all()
    assert (pages[390, 63, :, :, 3] == 1).all()


def test_a_captured_decode_replays_for_later_plans_of_other_lengths():
    case = cuda_case([1] * 8, [5000] * 8, page_size=16)
    attention = decoder(case)
    out = torch.empty_like(case.q)

    def run() -> None:
        attention.run(case.q, case.layer, case.kv_page_indices, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    starts = case.kv_page_indptr[:-1].tolist()
    for kv_lens in ([5000] * 8, [1, 17, 256, 5000, 300, 4999, 1024, 2], [3, 0, 0, 9, 0, 0, 0, 0]):
        attention.plan(kv_lens, table_starts=starts)
        graph.replay()
        replayed = out.clone()
        run()
        assert torch.equal(replayed, out)
        for request, kv_len in enumerate(kv_lens):
            alone = case.only(request).chunk([kv_len], [0]) if kv_len == 0 else None
            assert alone is None or (replayed[request] == 0).all()


def test_decode_uses_only_the_rule_s_cuts():
    case = cuda_case([1], [2000])

    other = decode(case, rule=SplitRule(split_len=512, splits_per_segment=2))

    assert not torch.equal(other, decode(case))  # the bits do depend on the cuts: fixed ones
    assert_close(other, case)
