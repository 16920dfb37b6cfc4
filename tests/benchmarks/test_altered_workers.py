"""That an alteration takes away the one part it names."""

from itertools import pairwise

import pytest

import llm_engine.decode_triton as decode_triton
from benchmarks.altered_workers import move_again, read_again, scatter_pages
from kv_cache.page_pool import PagePool
from kv_cache.prefix_cache import PrefixCache

PROMPT = list(range(70))


def cache() -> PrefixCache:
    return PrefixCache(num_pages=32, page_size=16, fingerprint="none")


def fill(cache: PrefixCache) -> list[int]:
    """Receive a prompt whole; returns its pages."""
    pages = cache.reserve(PROMPT, incoming=True)
    cache.commit(pages, len(pages.page_ids))
    return list(pages.page_ids)


def test_a_worker_that_moves_again_finds_nothing_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixCache, "_match_path", PrefixCache._match_path)  # to be restored
    usual = cache()
    fill(usual)
    assert usual.match(PROMPT).num_ready_pages == 4

    move_again()

    altered = cache()
    first = fill(altered)
    assert altered.match(PROMPT).num_ready_pages == 0
    second = altered.reserve(PROMPT, incoming=True)
    assert not set(first) & set(second.page_ids)
    assert second.num_cached_pages == 0
    # Equal pages become one when they have come, so that a step still reads them once.
    altered.commit(second, len(second.page_ids))
    altered.insert(second, PROMPT)
    assert second.page_ids[:4] == first[:4]


def test_a_worker_with_scattered_pages_hands_out_all_of_them_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PagePool, "__init__", PagePool.__init__)
    assert PagePool(64).allocate(8) == list(range(8))

    scatter_pages()

    pool = PagePool(64)
    pages = pool.allocate(64)
    assert sorted(pages) == list(range(64))
    assert sum(abs(a - b) == 1 for a, b in pairwise(pages)) < 8
    pool.dereference(pages)
    pool.check_integrity()


def test_a_worker_that_reads_again_takes_flat_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_triton, "reads_prefixes_once", decode_triton.reads_prefixes_once)

    read_again()

    assert not decode_triton.reads_prefixes_once(None, None)  # type: ignore[arg-type]
