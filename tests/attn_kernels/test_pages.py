from unittest.mock import patch

import pytest
import torch

from attn_kernels.debug_checks import debug
from attn_kernels.errors import (
    DeviceError,
    DtypeError,
    KernelInputError,
    PageTableError,
    ShapeError,
)
from attn_kernels.pages import reference
from attn_kernels.pages.launch import copy_between, copy_pages, gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from kv_cache.torch_storage import digest_multipliers, torch_digest


def random_pages(device: str, num_pages: int, page_words: int) -> torch.Tensor:
    """Random bits: some are NaN as floats, and must survive a copy."""
    generator = torch.Generator().manual_seed(num_pages)
    shape = (num_pages, page_words)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return words.to(torch.int32).to(device)


@pytest.mark.parametrize("page_words", [1, 4, 24, 8192, 10_000])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_gathered_pages_scatter_back(device: str, page_words: int, id_dtype: torch.dtype):
    pages = random_pages(device, 6, page_words)
    ids = torch.tensor([4, 0, 5], dtype=id_dtype, device=device)
    staging = torch.zeros(4, page_words, dtype=torch.int32, device=device)

    gather_pages(pages, ids, staging)

    expected = torch.zeros_like(staging)
    reference.gather_pages(pages, ids, expected)
    assert torch.equal(staging, expected)

    target = torch.zeros_like(pages)
    expected_target = torch.zeros_like(pages)
    scatter_pages(staging, ids, target)
    reference.scatter_pages(staging, ids, expected_target)
    assert torch.equal(target, expected_target)
    assert torch.equal(target[ids.long()], pages[ids.long()])


def test_pages_of_a_pool_copy_by_bytes_whatever_their_dtype(device: str):
    words = random_pages(device, 5, 2 * 2 * 3 * 4 * 16 // 2)
    pool = words.view(torch.bfloat16).view(5, 2, 2, 3, 4, 16)
    staging = torch.zeros(2, words.shape[1] * 4, dtype=torch.uint8, device=device)

    gather_pages(pool, torch.tensor([3, 1], device=device), staging)

    assert torch.equal(staging.view(torch.int32), words[[3, 1]])


def test_copy_within_a_pool(device: str):
    pages = random_pages(device, 6, 100)
    expected = pages.clone()
    sources = torch.tensor([0, 5], device=device)
    targets = torch.tensor([2, 3], device=device)

    copy_pages(pages, sources, targets)

    reference.copy_pages(expected, sources, targets)
    assert torch.equal(pages, expected)


def test_copy_between_pools_of_different_sizes(device: str):
    source, target = random_pages(device, 6, 100), random_pages(device, 9, 100)
    expected = target.clone()
    source_ids = torch.tensor([5, 0, 5], device=device)  # a page may be read twice
    target_ids = torch.tensor([8, 1, 2], device=device)

    copy_between(source, source_ids, target, target_ids)

    reference.copy_between(source, source_ids, expected, target_ids)
    assert torch.equal(target, expected)
    with pytest.raises(KernelInputError, match="target lies in the memory of source"):
        copy_between(source, source_ids, source[1:], target_ids)


def test_no_ids_copy_nothing(device: str):
    pages = random_pages(device, 2, 8)
    none = torch.zeros(0, dtype=torch.int64, device=device)

    gather_pages(pages, none, torch.zeros(1, 8, dtype=torch.int32, device=device))
    assert digest_pages(pages, none, digest_multipliers(8).to(device)).shape == (0, 2)


def test_pages_that_do_not_fit_are_refused(device: str):
    pages = random_pages(device, 4, 8)
    ids = torch.tensor([0, 1], device=device)

    with pytest.raises(ShapeError, match="32 bytes at the source and 36 at the target"):
        gather_pages(pages, ids, random_pages(device, 2, 9))
    with pytest.raises(ShapeError, match="target holds 1 pages, 2 ids"):
        gather_pages(pages, ids, random_pages(device, 1, 8))
    with pytest.raises(ShapeError, match="6 bytes, must be a multiple of 4"):
        gather_pages(torch.zeros(4, 6, dtype=torch.uint8, device=device), ids, pages)
    with pytest.raises(DtypeError, match="source_ids is torch"):
        gather_pages(pages, ids.float(), pages.clone())
    with pytest.raises(ShapeError, match=r"lengths \[1, 2\]"):
        copy_pages(pages, ids, ids[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("page_words", [1, 24, 10_000])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_staging_in_pinned_host_memory(page_words: int, id_dtype: torch.dtype):
    pages = random_pages("cuda", 6, page_words)
    gathered = torch.tensor([4, 0, 5], dtype=id_dtype, device="cuda")
    scattered = torch.tensor([1, 5, 2], dtype=id_dtype, device="cuda")
    expected = torch.full((4, page_words), 7, dtype=torch.int32)
    staging = expected.pin_memory()
    target, expected_target = torch.zeros_like(pages), torch.zeros_like(pages)

    gather_pages(pages, gathered, staging)
    scatter_pages(staging, scattered, target)
    torch.cuda.synchronize()

    reference.gather_pages(pages, gathered, expected)
    reference.scatter_pages(expected, scattered, expected_target)
    assert torch.equal(staging, expected)
    assert (staging[3] == 7).all()
    assert torch.equal(target, expected_target)
    wrong = pytest.raises(PageTableError, match="source_ids has 6 at index 0")
    with patch.object(debug, "is_on", new=True), wrong:
        gather_pages(pages, gathered + 2, staging)


def test_staging_on_the_host_must_be_pinned_and_ids_lie_with_the_pool(
    launches: list[object], monkeypatch: pytest.MonkeyPatch
):
    # Nothing is launched: any device that is not the host will do.
    pages, ids = torch.zeros(4, 8, device="meta"), torch.tensor([0, 1], device="meta")
    staging, host_ids = torch.zeros(2, 8), torch.tensor([0, 1])

    message = "staging is in unpinned host memory, must be on meta or in pinned host memory"
    with pytest.raises(DeviceError, match=message):
        gather_pages(pages, ids, staging)
    with pytest.raises(DeviceError, match=message):
        scatter_pages(staging, ids, pages)
    with pytest.raises(DeviceError, match="staging is on meta, must be on cpu or in pinned host"):
        gather_pages(staging, host_ids, pages)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    with pytest.raises(DeviceError, match="source_ids is on cpu, must be on meta"):
        gather_pages(pages, host_ids, staging)
    with pytest.raises(DeviceError, match="target_ids is on cpu, must be on meta"):
        scatter_pages(staging, host_ids, pages)
    assert not launches
    gather_pages(pages, ids, staging)
    scatter_pages(staging, ids, pages)
    assert len(launches) == 2


def test_pools_on_different_devices_are_refused(launches: list[object]):
    here, there = torch.zeros(4, 8), torch.zeros(4, 8, device="meta")
    ids = torch.tensor([0, 1])

    with pytest.raises(DeviceError, match="target is on meta, must be on cpu"):
        copy_between(here, ids, there, ids.to("meta"))
    assert not launches


def test_more_digests_than_a_grid_holds_are_refused(launches: list[object]):
    words, multipliers = torch.zeros(1, 1, dtype=torch.int32), digest_multipliers(1)
    ids = torch.zeros(65_535 * 16 + 1, dtype=torch.int64)

    with pytest.raises(ShapeError, match="page_ids has 1048561 entries, must have at most 1048560"):
        digest_pages(words, ids, multipliers)
    assert not launches
    digest_pages(words, ids[:-1], multipliers)
    assert len(launches) == 1


@pytest.mark.parametrize("page_words", [1, 100, 2048, 5000])
def test_digest_equals_the_storage_s_own(device: str, page_words: int):
    words = random_pages(device, 20, page_words)
    ids = torch.tensor([7, 0, 19, 7, *range(18)], device=device)
    multipliers = digest_multipliers(page_words).to(device)

    lanes = digest_pages(words, ids, multipliers)

    assert torch.equal(lanes, torch_digest(words, ids, multipliers))
    assert torch.equal(lanes, reference.digest_pages(words, ids, multipliers))
    assert torch.equal(lanes[0], lanes[3])
