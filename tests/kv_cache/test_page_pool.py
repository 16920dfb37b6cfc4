from dataclasses import asdict

import pytest

from kv_cache.errors import OutOfPages, PageStateError
from kv_cache.page_pool import PagePool, PageState


def snapshot(pool: PagePool) -> object:
    pages = range(pool.num_pages)
    return pool.counts(), [
        (pool.state(p), pool.num_references(p), pool.generation(p)) for p in pages
    ]


def test_a_page_passes_through_all_states() -> None:
    pool = PagePool(1)
    assert pool.state(0) is PageState.FREE
    pool.allocate(1, incoming=True)
    assert pool.state(0) is PageState.INCOMING
    pool.accept([0])
    assert pool.state(0) is PageState.LIVE
    pool.enter_tree([0])
    pool.lease([0])
    assert pool.state(0) is PageState.LIVE
    pool.dereference([0])
    assert pool.state(0) is PageState.LEASED
    pool.end_lease([0])
    assert pool.state(0) is PageState.CACHED
    pool.leave_tree(0)
    assert pool.state(0) is PageState.FREE
    pool.allocate(1, incoming=True)
    quarantined = pool.quarantine([0])
    assert pool.state(0) is PageState.QUARANTINE
    pool.release_quarantine(quarantined)
    assert pool.state(0) is PageState.FREE
    pool.check_integrity()


def test_states_partition_the_pool() -> None:
    pool = PagePool(10)
    cached = pool.allocate(1)
    leased = pool.allocate(2)
    pool.allocate(1)
    pool.allocate(1, incoming=True)
    pool.quarantine(pool.allocate(3, incoming=True))
    pool.enter_tree(cached[:1])
    pool.lease(leased)
    pool.dereference(cached + leased)

    counts = asdict(pool.counts())

    assert counts == {
        "total": 10,
        "free": 2,
        "live": 1,
        "cached": 1,
        "leased": 2,
        "incoming": 1,
        "quarantine": 3,
    }
    pool.check_integrity()


def test_failed_allocation_has_no_side_effect() -> None:
    pool = PagePool(4)
    pool.allocate(2)
    before = snapshot(pool)

    with pytest.raises(OutOfPages, match="3 pages needed, 2 free or evictable") as caught:
        pool.allocate(3)

    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert snapshot(pool) == before


def test_generation_grows_at_each_allocation() -> None:
    pool = PagePool(1)
    for expected in (1, 2, 3):
        assert pool.allocate(1) == [0]
        assert pool.generation(0) == expected
        pool.dereference([0])
        assert pool.generation(0) == expected


def test_double_free_raises_and_changes_nothing() -> None:
    pool = PagePool(3)
    page_ids = pool.allocate(2)
    pool.dereference(page_ids[1:])
    before = snapshot(pool)

    for double in (page_ids, [page_ids[0], page_ids[0]], [2]):
        with pytest.raises(PageStateError):
            pool.dereference(double)

    assert snapshot(pool) == before
    pool.check_integrity()


@pytest.mark.parametrize(
    ("state", "operation"),
    [
        (PageState.FREE, "reference"),
        (PageState.FREE, "lease"),
        (PageState.FREE, "accept"),
        (PageState.FREE, "quarantine"),
        (PageState.LIVE, "accept"),
        (PageState.LIVE, "end_lease"),
        (PageState.LIVE, "quarantine"),
        (PageState.INCOMING, "reference"),
        (PageState.INCOMING, "dereference"),
        (PageState.INCOMING, "lease"),
        (PageState.QUARANTINE, "reference"),
        (PageState.QUARANTINE, "dereference"),
        (PageState.QUARANTINE, "accept"),
    ],
)
def test_operation_is_refused(state: PageState, operation: str) -> None:
    pool = PagePool(1)
    if state is not PageState.FREE:
        pool.allocate(1, incoming=state is not PageState.LIVE)
    if state is PageState.QUARANTINE:
        pool.quarantine([0])
    assert pool.state(0) is state
    before = snapshot(pool)

    with pytest.raises(PageStateError):
        getattr(pool, operation)([0])

    assert snapshot(pool) == before


def test_a_quarantine_ends_once_and_only_for_the_owner_that_it_was_for() -> None:
    pool = PagePool(2)
    first = pool.quarantine(pool.allocate(2, incoming=True))
    pool.release_quarantine(first)
    with pytest.raises(PageStateError, match="is free"):
        pool.release_quarantine(first)
    pool.quarantine(pool.allocate(1, incoming=True))
    second = pool.quarantine(pool.allocate(1, incoming=True))
    before = snapshot(pool)

    with pytest.raises(PageStateError, match="for a later owner, of generation 2, not 1"):
        pool.release_quarantine(first)

    assert snapshot(pool) == before
    pool.release_quarantine(second)
    assert pool.counts().quarantine == 1


def test_pages_of_a_tree_are_not_quarantined() -> None:
    pool = PagePool(1)
    pool.allocate(1, incoming=True)
    pool.enter_tree([0])
    with pytest.raises(PageStateError, match="still in the tree"):
        pool.quarantine([0])


def test_pool_needs_a_page() -> None:
    with pytest.raises(ValueError, match="num_pages is 0, must be at least 1"):
        PagePool(0)
