import pytest

from kv_cache import prefix_cache as module
from kv_cache.errors import OutOfPages, PageStateError, SequenceEnded
from kv_cache.event_log import Removed, Stored
from kv_cache.page_hash import page_hashes
from kv_cache.page_pool import PageState
from kv_cache.prefix_cache import PrefixCache, PrefixMatch, SequencePages
from pagewire.protos.token_ids import pack_token_ids

PAGE_SIZE = 4


def build_cache(num_pages: int = 16) -> PrefixCache:
    return PrefixCache(num_pages=num_pages, page_size=PAGE_SIZE, fingerprint="model")


def serve(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> SequencePages:
    """Reserve a prompt and compute all of it."""
    seq = cache.reserve(tokens, salt, incoming=False)
    cache.commit(seq, len(seq.page_ids))
    return seq


def hashes(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return page_hashes(pack_token_ids(tokens), PAGE_SIZE, fingerprint="model", salt=salt)


def test_reserve_shares_the_ready_prefix() -> None:
    cache = build_cache()
    prefix = list(range(8))
    first = serve(cache, [*prefix, 50])

    second = cache.reserve([*prefix, 60, 61], incoming=False)

    assert second.num_cached_pages == 2
    assert second.page_ids[:2] == first.page_ids[:2]
    assert second.page_ids[2] != first.page_ids[2]
    assert cache.pool.counts().live == 4
    cache.check_integrity()


def test_match_leaves_a_token_to_compute() -> None:
    cache = build_cache()
    tokens = list(range(8))
    serve(cache, tokens)

    assert cache.match(tokens) == PrefixMatch(num_ready_pages=1, num_pending_pages=0)
    assert cache.match([*tokens, 1]) == PrefixMatch(num_ready_pages=2, num_pending_pages=0)
    assert cache.match(tokens[:4]).num_ready_pages == 0
    assert cache.match([]).num_ready_pages == 0


def test_recomputed_last_page_stays_private() -> None:
    cache = build_cache()
    tokens = list(range(8))
    first = serve(cache, tokens)
    cache.drain_events()

    second = serve(cache, tokens)

    assert second.page_ids[0] == first.page_ids[0]
    assert second.page_ids[1] != first.page_ids[1]
    assert len(cache.tree) == 2
    assert cache.drain_events() == []
    cache.release(second)
    assert cache.pool.state(first.page_ids[1]) is PageState.LIVE
    cache.check_integrity()


def test_a_twin_of_the_last_page_stays_until_the_sequence_has_computed_its_own() -> None:
    cache = build_cache(num_pages=4)
    tokens = list(range(8))
    cache.release(serve(cache, tokens))

    again = cache.reserve(tokens, incoming=False)
    assert cache.hold_twin(again, tokens)
    ((twin, own),) = again.twin_copies

    assert own == again.page_ids[1]
    assert cache.pool.counts().free + cache.pool.counts().cached == 1, "the twin is not evictable"
    cache.check_integrity()
    cache.commit(again, 2)
    assert again.twin_copies == ()
    assert cache.pool.state(twin) is PageState.CACHED
    cache.check_integrity()


def test_without_an_equal_ready_page_there_is_no_twin() -> None:
    cache = build_cache()
    tokens = list(range(8))
    pending = cache.reserve(tokens, incoming=False)
    cache.commit(pending, 1)
    for other in (tokens, [*tokens[:7], 50], [*tokens[:4], 50]):
        seq = cache.reserve(other, incoming=False)
        assert not cache.hold_twin(seq, other)
        assert seq.twin_copies == ()


def test_others_wait_for_pending_pages_and_get_them_chunk_by_chunk() -> None:
    cache = build_cache()
    tokens = list(range(13))
    seq = cache.reserve(tokens, incoming=True)

    last = seq.page_ids[2]
    assert cache.match(tokens) == PrefixMatch(
        num_ready_pages=0, num_pending_pages=3, last_pending_page=last
    )
    cache.commit(seq, 2)
    two_ready = PrefixMatch(num_ready_pages=2, num_pending_pages=1, last_pending_page=last)
    assert cache.match(tokens) == two_ready
    cache.commit(seq, 1)  # a late duplicate
    assert cache.match(tokens) == two_ready
    cache.commit(seq, 4)
    assert cache.match(tokens) == PrefixMatch(num_ready_pages=3, num_pending_pages=0)
    assert seq.num_committed_pages == 4


def test_incoming_pages_become_live_as_they_are_committed() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(13)), incoming=True)
    assert cache.pool.counts().incoming == 4

    cache.commit(seq, 3)

    assert [cache.pool.state(page_id) for page_id in seq.page_ids] == [
        *[PageState.LIVE] * 3,
        PageState.INCOMING,
    ]


def test_abort_keeps_committed_pages_and_quarantines_the_rest() -> None:
    cache = build_cache()
    tokens = list(range(18))
    seq = cache.reserve(tokens, incoming=True)
    cache.commit(seq, 2)
    page_ids = list(seq.page_ids)

    quarantined = cache.abort(seq, quarantine=True)

    assert [page.page_id for page in quarantined] == page_ids[2:]
    assert cache.pool.counts().quarantine == 3
    assert cache.match(tokens) == PrefixMatch(num_ready_pages=2, num_pending_pages=0)
    cache.check_integrity()
    retry = cache.reserve(tokens, incoming=True)
    assert retry.page_ids[:2] == page_ids[:2]
    assert not set(retry.page_ids) & set(page_ids[2:])
    cache.release_quarantine(quarantined)
    assert cache.pool.counts().quarantine == 0
    with pytest.raises(PageStateError):
        cache.release_quarantine(quarantined)


def test_abort_without_quarantine_frees_at_once() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(18)), incoming=True)
    assert cache.abort(seq, quarantine=False) == ()
    assert cache.pool.counts().free == 16
    cache.check_integrity()


def test_sequences_that_are_aborted_leave_nothing_behind() -> None:
    cache = build_cache()
    cache.release(serve(cache, [1] * 5))
    for n in range(2, 20):
        cache.abort(cache.reserve([n] * 16, incoming=True), quarantine=False)

    queued = [
        [page.page_id for page in node.run]
        for queue in cache.tree._queues.values()
        for *_, node in queue
    ]
    assert queued == [[0]]
    cache.check_integrity()


def late_write_after_abort(cache: PrefixCache) -> bool:
    """Let a write of an aborted transfer land; returns whether it hit another sequence's page."""
    failed = cache.reserve([1] * 16, incoming=True)
    posted = list(failed.page_ids)
    cache.abort(failed, quarantine=True)
    owner = cache.reserve([2] * 16, incoming=False)
    return bool(set(posted) & set(owner.page_ids))


def test_late_writes_never_reach_a_new_owner() -> None:
    assert not late_write_after_abort(build_cache(8))


def test_late_writes_reach_a_new_owner_without_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug shows that the scenario can fail."""
    original = PrefixCache.abort
    monkeypatch.setattr(
        PrefixCache, "abort", lambda self, seq, quarantine: original(self, seq, quarantine=False)
    )
    assert late_write_after_abort(build_cache(8))


def test_out_of_pages_changes_nothing_and_says_how_many() -> None:
    cache = build_cache(6)
    kept = serve(cache, [1] * 8)
    cache.release(serve(cache, [2] * 8))
    cache.drain_events()
    before = (cache.pool.counts(), cache.snapshot())

    with pytest.raises(OutOfPages) as caught:
        cache.reserve([1] * 4 + [3] * 30, incoming=False)

    assert (caught.value.needed, caught.value.available) == (8, 4)
    assert (cache.pool.counts(), cache.snapshot()) == before
    assert cache.drain_events() == []
    with pytest.raises(OutOfPages):
        cache.extend(kept, 30)
    assert len(kept.page_ids) == 2
    cache.check_integrity()


def test_pages_that_are_about_to_be_shared_do_not_count_as_available() -> None:
    cache = build_cache(4)
    cache.release(serve(cache, [1] * 12))
    with pytest.raises(OutOfPages) as caught:
        cache.reserve([1] * 12 + [2] * 8, incoming=False)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert cache.pool.counts().cached == 3


def test_eviction_takes_the_least_recently_used_tail_and_reports_it() -> None:
    cache = build_cache(6)
    cache.release(serve(cache, [1] * 12))
    cache.release(serve(cache, [2] * 12))
    cache.match([1] * 13)
    cache.drain_events()

    cache.reserve([3] * 4, incoming=False)
    assert cache.drain_events() == [Removed(hashes([2] * 12)[2])]
    cache.reserve([4] * 4, incoming=False)
    cache.reserve([5] * 4, incoming=False)
    assert cache.drain_events() == [Removed(page) for page in hashes([2] * 12)[1::-1]]
    assert cache.match([1] * 13).num_ready_pages == 3


def test_use_counts_until_the_release() -> None:
    cache = build_cache(4)
    long = serve(cache, [1] * 8)
    cache.release(serve(cache, [2] * 8))
    cache.release(long)

    cache.reserve([3] * 4, incoming=False)

    assert cache.match([1] * 9).num_ready_pages == 2
    assert cache.match([2] * 9).num_ready_pages == 1


def test_release_frees_private_and_pending_pages_and_keeps_ready_ones() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(14)), incoming=False)
    cache.commit(seq, 1)

    cache.release(seq)

    counts = cache.pool.counts()
    assert (counts.cached, counts.free) == (1, 15)
    assert cache.match(list(range(14))) == PrefixMatch(num_ready_pages=1, num_pending_pages=0)
    assert cache.snapshot() == hashes(list(range(14)))[:1]
    for operation in (cache.release, lambda seq: cache.extend(seq, 20)):
        with pytest.raises(SequenceEnded):
            operation(seq)
    cache.check_integrity()


def test_generated_pages_serve_the_next_turn() -> None:
    cache = build_cache()
    prompt, output = list(range(6)), list(range(50, 57))
    seq = serve(cache, prompt)
    for count in range(1, len(output) + 1):
        cache.extend(seq, len(prompt) + count)
    cache.insert(seq, prompt + output)
    cache.release(seq)

    assert cache.match([*prompt, *output, 99]).num_ready_pages == 3
    assert cache.drain_events() == [Stored(page) for page in hashes(prompt + output)]
    cache.check_integrity()


def test_insert_switches_to_an_equal_page_and_frees_its_own() -> None:
    cache = build_cache()
    tokens = list(range(12))
    first, second = serve(cache, tokens[:9]), serve(cache, tokens[:9])
    for seq in (first, second):
        cache.extend(seq, 12)
    assert first.page_ids[2] != second.page_ids[2]
    duplicate = second.page_ids[2]

    cache.insert(first, tokens)
    cache.insert(second, tokens)

    assert first.page_ids == second.page_ids
    assert cache.pool.state(duplicate) is PageState.FREE
    assert cache.pool.num_references(first.page_ids[2]) == 2
    cache.insert(second, tokens)
    cache.check_integrity()


def test_insert_stops_before_a_page_that_another_still_fills() -> None:
    cache = build_cache()
    tokens = list(range(12))
    seq = serve(cache, tokens[:5])
    cache.extend(seq, 12)
    other = cache.reserve([*tokens, 1], incoming=True)
    own = list(seq.page_ids)

    cache.insert(seq, tokens)
    assert seq.page_ids == own
    cache.commit(other, 4)
    cache.insert(seq, tokens)
    assert seq.page_ids == other.page_ids[:3]
    cache.check_integrity()


def test_insert_refuses_pages_that_were_not_verified() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(8)), incoming=True)
    with pytest.raises(AssertionError):
        cache.insert(seq, list(range(8)))


def test_fork_shares_full_pages_and_copies_a_partial_one() -> None:
    cache = build_cache()
    seq = serve(cache, list(range(10)))

    forked, copies = cache.fork(seq, 10)

    assert forked.page_ids[:2] == seq.page_ids[:2]
    assert copies == ((seq.page_ids[2], forked.page_ids[2]),)
    cache.release(seq)
    assert cache.pool.counts().live == 3
    cache.check_integrity()


def test_fork_at_a_page_boundary_needs_no_page() -> None:
    cache = build_cache(2)
    seq = serve(cache, list(range(8)))
    forked, copies = cache.fork(seq, 8)
    assert (forked.page_ids, copies) == (seq.page_ids, ())
    with pytest.raises(OutOfPages):
        cache.fork(seq, 7)
    assert cache.pool.num_references(seq.page_ids[0]) == 2


def test_fork_refuses_pages_that_are_not_computed() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(10)), incoming=False)
    with pytest.raises(AssertionError):
        cache.fork(seq, 10)


def test_lease_pins_pages_beyond_the_sequence() -> None:
    cache = build_cache(5)
    seq = serve(cache, list(range(18)))
    lease = cache.lease(seq, 5)
    assert list(lease.page_ids) == seq.page_ids

    cache.release(seq)

    # The last page is partial and private, the others are in the tree.
    assert cache.pool.counts().leased == 5
    with pytest.raises(OutOfPages):
        cache.reserve([99], incoming=False)
    cache.release_lease(lease)
    cache.release_lease(lease)
    counts = cache.pool.counts()
    assert (counts.cached, counts.free) == (4, 1)
    cache.reserve([99] * 20, incoming=False)
    cache.check_integrity()


def test_lease_before_the_pages_are_computed_ends_with_them_free() -> None:
    cache = build_cache()
    seq = cache.reserve(list(range(10)), incoming=False)
    lease = cache.lease(seq, 3)
    cache.release(seq)
    assert cache.pool.counts().leased == 3
    assert cache.match(list(range(10))).num_pending_pages == 0
    cache.release_lease(lease)
    assert cache.pool.counts().free == 16
    cache.check_integrity()


def test_pages_that_settle_are_told_whether_they_are_ready_or_gone() -> None:
    cache = build_cache()
    committed = cache.reserve(list(range(13)), incoming=True)
    aborted = cache.reserve([99, *range(12)], incoming=True)
    assert cache.drain_settled() == []

    cache.commit(committed, 2)
    cache.abort(aborted, quarantine=True)

    first, second, third = committed.page_ids[:3]
    gone = cache.drain_settled()
    assert gone[:2] == [first, second]
    assert len(gone) == 5
    assert cache.drain_settled() == []
    cache.commit(committed, 4)
    assert cache.drain_settled() == [third], "the last page is partial: nobody waits for it"


def test_tenants_share_nothing() -> None:
    cache = build_cache()
    tokens = list(range(8))
    serve(cache, tokens, b"one")
    other = serve(cache, tokens, b"two")
    assert other.num_cached_pages == 0
    assert cache.match([*tokens, 1], b"three").num_ready_pages == 0
    assert cache.snapshot() == sorted(hashes(tokens, b"one") + hashes(tokens, b"two"))


def test_a_hash_collision_shares_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "chained_hashes", lambda parent, new, key: [b"collision"] * len(new)
    )
    cache = build_cache()
    serve(cache, [1] * 8)
    assert cache.match([2] * 9).num_ready_pages == 0
    assert serve(cache, [1] * 4 + [2] * 5).num_cached_pages == 1


def test_one_token_at_a_page_edge_parts_two_prompts() -> None:
    cache = build_cache()
    base = list(range(12))
    serve(cache, base)
    for position, num_shared in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        changed = [*base, 100]
        changed[position] = 77
        assert cache.match(changed).num_ready_pages == num_shared


def test_hash_key_changes_the_hashes_only() -> None:
    keyed = PrefixCache(num_pages=4, page_size=PAGE_SIZE, fingerprint="model", hash_key=b"secret")
    serve(keyed, [1] * 9)
    expected = page_hashes(pack_token_ids([1] * 9), PAGE_SIZE, fingerprint="model", key=b"secret")
    assert keyed.snapshot() == sorted(expected)
    assert keyed.match([1] * 9).num_ready_pages == 2


def test_what_a_salt_has_cached_beyond_its_quota_goes_at_once() -> None:
    cache = build_cache(20)
    cache.limit(b"small", 0.15)
    for first in (0, 100):
        cache.release(serve(cache, list(range(first, first + 8)), b"small"))

    assert cache.pool.num_held(b"small") == 3
    assert cache.match([*range(100, 108), 1], b"small").num_ready_pages == 2
    assert cache.match([*range(8), 1], b"small").num_ready_pages == 1, "its tail went"
    assert cache.num_over_quota == 1
    cache.limit(b"small", 0.05)
    assert cache.pool.num_held(b"small") == 1
    cache.limit(b"small", 1.0)
    cache.release(serve(cache, list(range(200, 240)), b"small"))
    assert cache.pool.num_held(b"small") == 11
    cache.check_integrity()


def test_a_salt_over_its_quota_loses_its_own_before_others_lose_theirs() -> None:
    cache = build_cache(10)
    cache.release(serve(cache, list(range(16)), b"old"))  # four pages, used longest ago
    cache.limit(b"small", 0.4)
    cache.release(serve(cache, list(range(100, 112)), b"small"))  # three
    cache.release(serve(cache, list(range(200, 208)), b"small"))  # two: one of the three goes

    running = serve(cache, list(range(300, 312)), b"small")  # three: all but one go

    assert cache.match([*range(16), 1], b"old").num_ready_pages == 4
    assert cache.pool.num_held(b"small") == 4
    longer = serve(cache, list(range(400, 412)), b"small")  # three: one of them others' or free
    assert cache.pool.num_held(b"small") == 6, "what runs is not taken"
    assert cache.match([*range(16), 1], b"old").num_ready_pages == 4, "there was a free one"
    cache.release(running)
    cache.release(longer)
    assert cache.pool.num_held(b"small") == 4
    cache.check_integrity()


def test_a_leased_page_counts_until_its_lease_ends() -> None:
    cache = build_cache(10)
    cache.limit(b"small", 0.2)
    seq = serve(cache, list(range(16)), b"small")
    lease = cache.lease(seq, 4)
    cache.release(seq)
    assert cache.pool.num_held(b"small") == 4

    cache.release_lease(lease)

    assert cache.pool.num_held(b"small") == 2
    cache.check_integrity()


def test_a_quota_is_a_page_at_least() -> None:
    cache = build_cache(10)
    cache.limit(b"small", 1e-9)
    cache.release(serve(cache, list(range(16)), b"small"))

    assert cache.pool.num_held(b"small") == 1
