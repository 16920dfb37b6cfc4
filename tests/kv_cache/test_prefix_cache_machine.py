"""The state machine passes on the real cache and fails on every planted bug."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kv_cache import prefix_cache as module
from kv_cache.errors import CacheError
from kv_cache.event_log import Removed
from kv_cache.page_hash import split_pages
from kv_cache.page_pool import PagePool, PageState, Quarantined
from kv_cache.prefix_cache import Lease, PrefixCache, SequencePages
from kv_cache.radix_tree import RadixTree, TreePage
from tests.kv_cache.cache_machine import CacheMachine, QuotaMachine
from tests.support.planted_bugs import (
    Plant,
    Right,
    instead_of,
    quotas_bound_nothing,
    who_used_it_longest_ago_goes_first,
)
from tests.support.rarely import rarely

SETTINGS = settings(
    derandomize=True,
    database=None,
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("max_examples", [80, pytest.param(1500, marks=pytest.mark.thorough)])
def test_cache_agrees_with_the_oracle(max_examples: int) -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(SETTINGS, max_examples=max_examples))


@pytest.mark.parametrize("max_examples", [50, pytest.param(1000, marks=pytest.mark.thorough)])
def test_cache_with_quotas_agrees_with_the_oracle(max_examples: int) -> None:
    run_state_machine_as_test(QuotaMachine, settings=settings(SETTINGS, max_examples=max_examples))


def assert_finds_it(machine: type[CacheMachine]) -> None:
    quick = settings(
        SETTINGS,
        max_examples=400,
        stateful_step_count=30,  # in shorter examples most are found sooner
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )

    with pytest.raises((AssertionError, CacheError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=quick)


def abort_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    right = PrefixCache.abort

    def abort(
        self: PrefixCache, seq: SequencePages, *, quarantine: bool
    ) -> tuple[Quarantined, ...]:
        incoming = [p for p in seq.page_ids if self.pool.state(p) is PageState.INCOMING]
        right(self, seq, quarantine=False)
        return tuple(Quarantined(p, 0) for p in incoming) if quarantine else ()

    patch.setattr(PrefixCache, "abort", abort)
    patch.setattr(PagePool, "release_quarantine", lambda self, pages: None)


def abort_leaves_pending_pages_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_withdraw_pending", lambda self, seq: None)


@instead_of(RadixTree, "evict")
def eviction_takes_held_pages(
    right: Right, self: RadixTree, num_pages: int, _: object, *, salt: bytes | None = None
) -> list[TreePage]:
    return right(self, num_pages, lambda page_id: True, salt=salt)


@instead_of(PagePool, "dereference")
def release_ignores_other_holders(right: Right, self: PagePool, page_ids: Sequence[int]) -> None:
    for page_id in page_ids:
        self._references[page_id] = min(1, self._references[page_id])
    right(self, page_ids)


def eviction_forgets_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "offer", lambda self, page_id: None)


@instead_of(PrefixCache, "drain_events")
def eviction_sends_no_event(right: Right, self: PrefixCache) -> list[object]:
    return [event for event in right(self) if not isinstance(event, Removed)]


def leases_pin_nothing(patch: pytest.MonkeyPatch) -> None:
    def lease(self: PrefixCache, seq: SequencePages, num_pages: int) -> Lease:
        return Lease(lease_id=0, page_ids=tuple(seq.page_ids[:num_pages]))

    patch.setattr(PrefixCache, "lease", lease)


@instead_of(PrefixCache, "lease")
def leases_pin_all_but_one(
    right: Right, self: PrefixCache, seq: SequencePages, num_pages: int
) -> Lease:
    pinned = right(self, seq, num_pages - 1)
    return Lease(lease_id=pinned.lease_id, page_ids=tuple(seq.page_ids[:num_pages]))


def lease_ends_twice(patch: pytest.MonkeyPatch) -> None:
    def release_lease(self: PrefixCache, lease: Lease) -> None:
        self.pool.end_lease(self._leases[lease.lease_id][1])

    patch.setattr(PrefixCache, "release_lease", release_lease)


def a_reference_leaks(patch: pytest.MonkeyPatch) -> None:
    right = PagePool.dereference
    patch.setattr(
        PagePool, "dereference", lambda self, ids: right(self, ids[: max(1, len(ids) - 1)])
    )


def double_free_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "_require", lambda self, page_ids, allowed: None)


@instead_of(PagePool, "allocate")
def generations_stand_still(
    right: Right, self: PagePool, num_pages: int, *, incoming: bool = False, owner: bytes = b""
) -> list[int]:
    before = list(self._generations)
    page_ids = right(self, num_pages, incoming=incoming, owner=owner)
    self._generations = before
    return page_ids


@instead_of(PrefixCache, "_acquire")
def failed_reserve_keeps_references(
    right: Right, self: PrefixCache, salt: bytes, shared: Sequence[int], num_new: int, **kind: bool
) -> list[int]:
    self.pool.reference(shared)
    page_ids = right(self, salt, shared, num_new, **kind)
    self.pool.dereference(shared)
    return page_ids


@instead_of(PrefixCache, "_acquire")
def failed_reserve_evicts(
    right: Right, self: PrefixCache, salt: bytes, shared: Sequence[int], num_new: int, **kind: bool
) -> list[int]:
    self.pool.reference(shared)
    for page in self.tree.evict(num_new - self.pool.num_free, self._is_evictable):
        self.pool.leave_tree(page.page_id)
        self._events.append(Removed(page.page_hash))
    self.pool.dereference(shared)
    for page_id in shared:
        self.tree.offer(page_id)
    return right(self, salt, shared, num_new, **kind)


@instead_of(PrefixCache, "_enter_next")
def pending_pages_count_as_ready(
    right: Right, self: PrefixCache, seq: SequencePages, new: Sequence[bytes], *, is_ready: bool
) -> None:
    right(self, seq, new, is_ready=True)


def commit_leaves_pages_incoming(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "accept", lambda self, page_ids: None)


def tenants_share_pages(patch: pytest.MonkeyPatch) -> None:
    right = RadixTree.match
    patch.setattr(RadixTree, "match", lambda self, tokens, salt=b"": right(self, tokens))


def tree_trusts_a_short_hash(patch: pytest.MonkeyPatch) -> None:
    def first_tokens(token_ids: Sequence[int], page_size: int) -> list[bytes]:
        return [tokens[:4] for tokens in split_pages(token_ids, page_size)]

    patch.setattr(module, "split_pages", first_tokens)


@instead_of(RadixTree, "_split_after")
def split_loses_the_lower_part(right: Right, self: RadixTree, page: TreePage) -> object:
    upper = right(self, page)
    if page.node.children:
        upper.children.clear()
    return upper


@instead_of(PrefixCache, "fork")
def fork_shares_the_partial_page(
    right: Right, self: PrefixCache, seq: SequencePages, num_tokens: int
) -> object:
    forked, copies = right(self, seq, num_tokens)
    return forked, copies[:0]


def insert_enters_shared_private_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_is_shared", lambda self, page_id: False)


@instead_of(PrefixCache, "insert")
def insert_keeps_its_own_copy(
    right: Right, self: PrefixCache, seq: SequencePages, token_ids: Sequence[int]
) -> None:
    before = list(seq.page_ids)
    right(self, seq, token_ids)
    for own, now in zip(before, seq.page_ids, strict=True):
        if own != now and self.pool.state(own) is PageState.FREE:
            self.pool._references[own] += 1
            self.pool._settle(own)


@pytest.mark.parametrize(
    "plant",
    [
        eviction_takes_held_pages,
        release_ignores_other_holders,
        eviction_forgets_leaves,
        eviction_sends_no_event,
        leases_pin_nothing,
        lease_ends_twice,
        a_reference_leaks,
        double_free_is_accepted,
        generations_stand_still,
        failed_reserve_keeps_references,
        failed_reserve_evicts,
        pending_pages_count_as_ready,
        commit_leaves_pages_incoming,
        tenants_share_pages,
        tree_trusts_a_short_hash,
        split_loses_the_lower_part,
        fork_shares_the_partial_page,
        *rarely(  # one example of a hundred finds them
            abort_frees_at_once,
            abort_leaves_pending_pages_in_the_tree,
            leases_pin_all_but_one,
            insert_enters_shared_private_pages,
            insert_keeps_its_own_copy,
        ),
    ],
    ids=lambda plant: plant.__name__,
)
def test_machine_catches(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert_finds_it(CacheMachine)


@instead_of(PrefixCache, "_keep_quota")
def only_what_is_new_is_bounded(
    right: Right, self: PrefixCache, salt: bytes, num_new: int = 0
) -> None:
    if num_new:
        right(self, salt, num_new)


@instead_of(PrefixCache, "_acquire")
def new_pages_are_bounded_too_late(
    right: Right, self: PrefixCache, salt: bytes, shared: Sequence[int], num_new: int, **kind: bool
) -> list[int]:
    quota = self._quotas.pop(salt, None)
    page_ids = right(self, salt, shared, num_new, **kind)
    if quota is not None:
        self._quotas[salt] = quota
        self._keep_quota(salt)
    return page_ids


@instead_of(PagePool, "allocate")
def pages_of_a_fork_are_nobodys(
    right: Right, self: PagePool, num_pages: int, *, incoming: bool = False, owner: bytes = b""
) -> list[int]:
    return right(self, num_pages, incoming=incoming, owner=owner if num_pages > 1 else b"-")


def ended_leases_are_kept(patch: pytest.MonkeyPatch) -> None:
    def release_lease(self: PrefixCache, lease: Lease) -> None:
        _, pinned = self._leases.pop(lease.lease_id, (b"", ()))
        self.pool.end_lease(pinned)
        for page_id in pinned:
            self.tree.offer(page_id)

    patch.setattr(PrefixCache, "release_lease", release_lease)


@pytest.mark.parametrize(
    "plant",
    [
        quotas_bound_nothing,
        who_used_it_longest_ago_goes_first,
        only_what_is_new_is_bounded,
        new_pages_are_bounded_too_late,
        pages_of_a_fork_are_nobodys,
        ended_leases_are_kept,
    ],
    ids=lambda plant: plant.__name__,
)
def test_machine_with_quotas_catches(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(PrefixCache, "check_integrity", lambda self: None)  # the oracle must see it
    assert_finds_it(QuotaMachine)
