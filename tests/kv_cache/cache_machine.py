"""A state machine that drives PrefixCache beside a naive oracle with page contents.

The oracle knows prefixes as tuples, holders as lists, and what every slot of every page must
contain: the tokens up to it. Posted writes of failed transfers land whenever hypothesis likes.
"""

import sys
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache.errors import OutOfPages, PageStateError, SequenceEnded
from kv_cache.event_log import Stored
from kv_cache.page_hash import page_hashes
from kv_cache.page_pool import PageState, Quarantined
from kv_cache.prefix_cache import Lease, PrefixCache, SequencePages
from pagewire.protos.token_ids import pack_token_ids

PAGE_SIZE = 2
NUM_PAGES = 10
FINGERPRINT = "model"

Prefix = tuple[bytes, tuple[int, ...]]  # salt, tokens

# Few different pages, so that prompts share prefixes, part in the middle of a run, and are twins.
tokens_strategy = st.builds(
    lambda pages, rest: [token for page in pages for token in page] + rest,
    st.lists(st.sampled_from([(0, 0), (0, 1)]), min_size=1, max_size=4),
    st.sampled_from([[], [0], [1]]),
)
salt_strategy = st.sampled_from([b"", b"", b"", b"tenant"])
pick_strategy = st.integers(0, 1000)  # chooses among what exists, modulo


@dataclass(eq=False, kw_only=True)
class ModelSequence:
    pages: SequencePages
    page_ids: list[int]
    salt: bytes
    tokens: list[int]
    num_computed: int  # tokens whose slots are written and final
    is_incoming: bool
    twin: int | None = None  # pinned page of the tree, equal to the last one

    def prefix(self, num_pages: int) -> Prefix:
        return (self.salt, tuple(self.tokens[: num_pages * PAGE_SIZE]))

    @property
    def is_filled(self) -> bool:
        return self.num_computed == len(self.tokens)

    @property
    def num_filled_pages(self) -> int:
        return -(-self.num_computed // PAGE_SIZE)


@dataclass(eq=False, kw_only=True)
class LateTransfer:
    quarantined: tuple[Quarantined, ...]
    posted: list[int]  # pages that it may still write


@dataclass(eq=False, kw_only=True)
class ModelLease:
    lease: Lease
    salt: bytes
    pinned: list[int]


@dataclass
class Oracle:
    tree: dict[Prefix, int] = field(default_factory=dict)  # |-> page_id
    ready: set[Prefix] = field(default_factory=set)
    sequences: list[ModelSequence] = field(default_factory=list)
    leases: list[ModelLease] = field(default_factory=list)
    transfers: list[LateTransfer] = field(default_factory=list)
    generations: list[int] = field(default_factory=lambda: [0] * NUM_PAGES)
    owners: dict[int, bytes] = field(default_factory=dict)  # page_id |-> for whom it was handed out
    slots: dict[tuple[int, int], object] = field(default_factory=dict)  # (page_id, offset) |->

    def num_references(self, page_id: int) -> int:
        return sum(seq.page_ids.count(page_id) for seq in self.sequences)

    def num_leases(self, page_id: int) -> int:
        num_twins = sum(seq.twin == page_id for seq in self.sequences)
        return num_twins + sum(lease.pinned.count(page_id) for lease in self.leases)

    def state(self, page_id: int) -> PageState:
        pages = (page for transfer in self.transfers for page in transfer.quarantined)
        if any(page.page_id == page_id for page in pages):
            return PageState.QUARANTINE
        for seq in self.sequences:
            if page_id in seq.page_ids:
                is_awaited = page_id in seq.page_ids[seq.num_filled_pages :]
                return PageState.INCOMING if seq.is_incoming and is_awaited else PageState.LIVE
        if self.num_leases(page_id):
            return PageState.LEASED
        return PageState.CACHED if page_id in self.tree.values() else PageState.FREE

    def held(self, salt: bytes) -> list[PageState]:
        """States of the pages that were handed out for a salt and are not free again."""
        states = [self.state(page) for page, owner in self.owners.items() if owner == salt]
        return [state for state in states if state is not PageState.FREE]

    def match(self, tokens: list[int], salt: bytes) -> tuple[int, int]:
        path = []
        for num_pages in range(1, max(len(tokens) - 1, 0) // PAGE_SIZE + 1):
            prefix = (salt, tuple(tokens[: num_pages * PAGE_SIZE]))
            if prefix not in self.tree:
                break
            path.append(prefix in self.ready)
        return sum(path), len(path) - sum(path)


class CacheMachine(RuleBasedStateMachine):
    quotas: ClassVar[dict[bytes, int]] = {}  # salt |-> most pages that it may keep

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, fingerprint=FINGERPRINT)
        for salt, num_pages in self.quotas.items():
            self.cache.limit(salt, num_pages / NUM_PAGES)
        self.oracle = Oracle()
        self.names: dict[bytes, Prefix] = {}  # page hash |-> prefix
        self.stored: set[bytes] = set()  # as a follower of the events knows it

    # Beginnings

    @rule(
        tokens=tokens_strategy,
        salt=salt_strategy,
        is_incoming=st.booleans(),
        num_filled=st.sampled_from([0, 1, 4, 4, 4]),
    )
    def reserve(self, tokens: list[int], salt: bytes, is_incoming: bool, num_filled: int) -> None:
        match = self.cache.match(tokens, salt)
        num_ready, num_pending = self.oracle.match(tokens, salt)
        assert (match.num_ready_pages, match.num_pending_pages) == (num_ready, num_pending)
        if num_pending:
            return
        model = ModelSequence(
            pages=None,  # type: ignore[arg-type]
            page_ids=[],
            salt=salt,
            tokens=tokens,
            num_computed=num_ready * PAGE_SIZE,
            is_incoming=is_incoming,
        )
        shared = [self.oracle.tree[model.prefix(n + 1)] for n in range(num_ready)]
        num_new = -(-len(tokens) // PAGE_SIZE) - num_ready
        if not self.can_get(num_new, shared):
            with self.expect_no_effect(num_new):
                self.cache.reserve(tokens, salt, incoming=is_incoming)
            return
        before = self.states()

        model.pages = self.cache.reserve(tokens, salt, incoming=is_incoming)

        assert model.pages.num_cached_pages == num_ready
        assert model.pages.page_ids[:num_ready] == shared
        self.take_fresh(salt, model.pages.page_ids[num_ready:], num_new, before, shared)
        model.page_ids = list(model.pages.page_ids)
        self.oracle.sequences.append(model)
        for num_pages in range(num_ready + 1, len(tokens) // PAGE_SIZE + 1):
            if model.prefix(num_pages) in self.oracle.tree:
                break
            self.oracle.tree[model.prefix(num_pages)] = model.page_ids[num_pages - 1]
        if not is_incoming:
            self.hold_twin(model)
        self.fill_pages(model, num_filled)

    @precondition(lambda self: any(seq.num_computed for seq in self.oracle.sequences))
    @rule(pick=pick_strategy, length=pick_strategy)
    def fork(self, pick: int, length: int) -> None:
        parents = [seq for seq in self.oracle.sequences if seq.num_computed]
        parent = parents[pick % len(parents)]
        num_tokens = length % parent.num_computed + 1
        num_full, rest = divmod(num_tokens, PAGE_SIZE)
        shared = parent.page_ids[:num_full]
        if not self.can_get(bool(rest), shared):
            with self.expect_no_effect(1):
                self.cache.fork(parent.pages, num_tokens)
            return
        before = self.states()

        forked, copies = self.cache.fork(parent.pages, num_tokens)

        fresh = forked.page_ids[num_full:]
        self.take_fresh(parent.salt, fresh, int(bool(rest)), before, shared)
        assert forked.page_ids[:num_full] == shared
        assert [source for source, _ in copies] == parent.page_ids[num_full:][: len(copies)]
        assert [target for _, target in copies] == forked.page_ids[num_full:]
        for source, target in copies:
            for offset in range(PAGE_SIZE):
                self.oracle.slots[target, offset] = self.oracle.slots.get((source, offset))
        self.oracle.sequences.append(
            ModelSequence(
                pages=forked,
                page_ids=list(forked.page_ids),
                salt=parent.salt,
                tokens=parent.tokens[:num_tokens],
                num_computed=num_tokens,
                is_incoming=False,
            )
        )

    def hold_twin(self, seq: ModelSequence) -> None:
        """Copy the page that is left to compute, if it is in the tree, all but its last slot."""
        last = seq.prefix(len(seq.page_ids))
        if seq.num_filled_pages == len(seq.page_ids) - 1 and len(last[1]) % PAGE_SIZE == 0:
            seq.twin = self.oracle.tree[last] if last in self.oracle.ready else None

        assert self.cache.hold_twin(seq.pages, seq.tokens) == (seq.twin is not None)

        for source, target in seq.pages.twin_copies:
            assert (source, target) == (seq.twin, seq.page_ids[-1])
            for offset in range(PAGE_SIZE - 1):
                self.oracle.slots[target, offset] = self.oracle.slots[source, offset]
            seq.num_computed = len(seq.tokens) - 1

    # Progress

    @precondition(lambda self: any(not seq.is_filled for seq in self.oracle.sequences))
    @rule(pick=pick_strategy, num_pages=st.integers(1, 3))
    def fill(self, pick: int, num_pages: int) -> None:
        """Compute or receive the next pages of a prompt."""
        unfilled = [seq for seq in self.oracle.sequences if not seq.is_filled]
        seq = unfilled[pick % len(unfilled)]
        self.fill_pages(seq, num_pages)

    def fill_pages(self, seq: ModelSequence, num_pages: int) -> None:
        end_page = min(seq.num_filled_pages + num_pages, len(seq.page_ids))
        self.write(seq, seq.num_computed, min(end_page * PAGE_SIZE, len(seq.tokens)))

        self.cache.commit(seq.pages, end_page)
        if seq.is_filled and seq.twin is not None:
            seq.twin = None
            self.take_trimmed(seq.salt)

        assert seq.pages.num_committed_pages == end_page
        for count in range(1, len(seq.tokens[: seq.num_computed]) // PAGE_SIZE + 1):
            if self.oracle.tree.get(seq.prefix(count)) == seq.page_ids[count - 1]:
                self.oracle.ready.add(seq.prefix(count))

    @precondition(lambda self: any(seq.is_filled for seq in self.oracle.sequences))
    @rule(pick=pick_strategy, token=st.integers(0, 1))
    def generate(self, pick: int, token: int) -> None:
        seq = self.filled(pick)
        num_new = -(-(len(seq.tokens) + 1) // PAGE_SIZE) - len(seq.page_ids)
        if not self.can_get(num_new, []):
            with self.expect_no_effect(num_new):
                self.cache.extend(seq.pages, len(seq.tokens) + 1)
            return
        before = self.states()

        self.cache.extend(seq.pages, len(seq.tokens) + 1)

        fresh = seq.pages.page_ids[len(seq.page_ids) :]
        self.take_fresh(seq.salt, fresh, num_new, before, [])
        seq.page_ids = list(seq.pages.page_ids)
        seq.tokens.append(token)
        self.write(seq, len(seq.tokens) - 1, len(seq.tokens))

    @precondition(lambda self: any(seq.is_filled for seq in self.oracle.sequences))
    @rule(pick=pick_strategy)
    def insert(self, pick: int) -> None:
        seq = self.filled(pick)
        expected = list(seq.page_ids)
        for index in range(len(seq.tokens) // PAGE_SIZE):
            own, prefix = expected[index], seq.prefix(index + 1)
            twin = self.oracle.tree.get(prefix)
            if twin is None:
                if self.oracle.num_references(own) > 1 or self.oracle.num_leases(own):
                    break
                self.oracle.tree[prefix] = own
                self.oracle.ready.add(prefix)
            elif prefix in self.oracle.ready:
                expected[index] = twin
            else:
                break

        self.cache.insert(seq.pages, seq.tokens)

        assert seq.pages.page_ids == expected
        seq.page_ids = expected

    # Ends

    @precondition(lambda self: self.oracle.sequences)
    @rule(pick=pick_strategy, quarantine=st.booleans())
    def end(self, pick: int, quarantine: bool) -> None:
        seq = self.oracle.sequences[pick % len(self.oracle.sequences)]
        self.oracle.sequences.remove(seq)
        unfilled = seq.page_ids[seq.num_filled_pages :]
        for prefix in [p for p, page in self.oracle.tree.items() if page in unfilled]:
            del self.oracle.tree[prefix]
        if not seq.is_incoming or seq.is_filled:
            self.cache.release(seq.pages)
        else:
            returned = self.cache.abort(seq.pages, quarantine=quarantine)
            if quarantine:
                assert sorted(page.page_id for page in returned) == sorted(unfilled)
                self.oracle.transfers.append(
                    LateTransfer(quarantined=returned, posted=list(unfilled))
                )
            else:
                assert returned == ()
        self.take_trimmed(seq.salt)
        with pytest.raises(SequenceEnded):
            self.cache.release(seq.pages)

    @precondition(lambda self: any(transfer.posted for transfer in self.oracle.transfers))
    @rule(pick=pick_strategy)
    def late_write(self, pick: int) -> None:
        pending = [transfer for transfer in self.oracle.transfers if transfer.posted]
        page_id = pending[pick % len(pending)].posted.pop()
        for offset in range(PAGE_SIZE):
            self.oracle.slots[page_id, offset] = "stale"

    @precondition(lambda self: self.oracle.transfers)
    @rule(pick=pick_strategy)
    def become_quiet(self, pick: int) -> None:
        transfer = self.oracle.transfers.pop(pick % len(self.oracle.transfers))
        self.cache.release_quarantine(transfer.quarantined)

    @precondition(lambda self: any(not s.is_incoming or s.is_filled for s in self.oracle.sequences))
    @rule(pick=pick_strategy, count=pick_strategy)
    def lease(self, pick: int, count: int) -> None:
        sendable = [seq for seq in self.oracle.sequences if not seq.is_incoming or seq.is_filled]
        seq = sendable[pick % len(sendable)]
        count = count % len(seq.page_ids) + 1

        lease = self.cache.lease(seq.pages, count)

        assert list(lease.page_ids) == seq.page_ids[:count]
        pinned = seq.page_ids[:count]
        self.oracle.leases.append(ModelLease(lease=lease, salt=seq.salt, pinned=pinned))

    @precondition(lambda self: self.oracle.leases)
    @rule(pick=pick_strategy)
    def end_lease(self, pick: int) -> None:
        ended = self.oracle.leases.pop(pick % len(self.oracle.leases))
        self.cache.release_lease(ended.lease)
        self.take_trimmed(ended.salt)
        self.cache.release_lease(ended.lease)

    @rule(page_id=st.integers(0, NUM_PAGES - 1))
    def free_twice(self, page_id: int) -> None:
        if self.oracle.num_references(page_id) == 0:
            before = self.everything()
            with pytest.raises(PageStateError):
                self.cache.pool.dereference([page_id])
            assert self.everything() == before

    # What must always hold

    @invariant()
    def pool_agrees(self) -> None:
        pool, oracle = self.cache.pool, self.oracle
        self.follow_events()
        expected = [oracle.state(page_id) for page_id in range(NUM_PAGES)]
        assert self.states() == expected
        counts = pool.counts()
        assert counts.total == NUM_PAGES
        for state in PageState:
            assert getattr(counts, state.value) == expected.count(state)
        for page_id in range(NUM_PAGES):
            assert pool.num_references(page_id) == oracle.num_references(page_id)
            assert pool.num_leases(page_id) == oracle.num_leases(page_id)
            assert pool.generation(page_id) == oracle.generations[page_id]
        for salt, quota in self.quotas.items():
            held = oracle.held(salt)
            assert pool.num_held(salt) == len(held)
            assert len(held) <= quota or PageState.CACHED not in held, "cached beyond the quota"

    @invariant()
    def tree_agrees(self) -> None:
        self.follow_events()
        in_tree = {page.page_id: page.is_ready for page in self.cache.tree}
        assert in_tree == {
            page_id: prefix in self.oracle.ready for prefix, page_id in self.oracle.tree.items()
        }
        assert {self.names[name] for name in self.stored} == self.oracle.ready
        assert self.cache.snapshot() == sorted(self.stored)
        self.cache.check_integrity()

    @invariant()
    def contents_are_right(self) -> None:
        for seq in self.oracle.sequences:
            assert seq.pages.page_ids == seq.page_ids
            for position in range(seq.num_computed):
                self.check_slot(seq.page_ids[position // PAGE_SIZE], seq.salt, seq.tokens, position)
        for salt, tokens in self.oracle.ready:
            for position in range(len(tokens) - PAGE_SIZE, len(tokens)):
                self.check_slot(self.oracle.tree[salt, tokens], salt, list(tokens), position)

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # the run has failed: what follows would hide why
        while self.oracle.sequences:
            self.end(0, True)
        while self.oracle.leases:
            self.end_lease(0)
        while self.oracle.transfers:
            self.become_quiet(0)
        self.pool_agrees()
        self.tree_agrees()
        counts = self.cache.pool.counts()
        assert counts.free + counts.cached == NUM_PAGES
        self.cache.reserve([0] * (NUM_PAGES * PAGE_SIZE), b"other tenant", incoming=False)
        self.cache.check_integrity()

    # Helpers

    def states(self) -> list[PageState]:
        return [self.cache.pool.state(page_id) for page_id in range(NUM_PAGES)]

    def everything(self) -> object:
        pool = self.cache.pool
        return self.states(), [
            (pool.num_references(p), pool.num_leases(p), pool.generation(p), self.cache.snapshot())
            for p in range(NUM_PAGES)
        ]

    def filled(self, pick: int) -> ModelSequence:
        filled = [seq for seq in self.oracle.sequences if seq.is_filled]
        return filled[pick % len(filled)]

    def can_get(self, num_new: int, shared: list[int]) -> bool:
        usable = {PageState.FREE, PageState.CACHED}
        others = set(range(NUM_PAGES)) - set(shared)
        return num_new <= sum(self.oracle.state(page_id) in usable for page_id in others)

    def expect_no_effect(self, needed: int) -> "ExpectNoEffect":
        return ExpectNoEffect(self, needed)

    def take_fresh(
        self,
        owner: bytes,
        fresh: list[int],
        count: int,
        before: list[PageState],
        shared: list[int],
    ) -> None:
        """Check pages that were just handed out, and the evictions that made room for them."""
        assert len(fresh) == len(set(fresh)) == max(count, 0)
        num_own = 0  # that the owner's quota has cost
        if owner in self.quotas:
            is_own = [self.oracle.owners.get(page) == owner for page in range(NUM_PAGES)]
            held = [b for b, own in zip(before, is_own, strict=True) if own]
            num_held = sum(state is not PageState.FREE for state in held)
            num_cached = held.count(PageState.CACHED) - sum(
                before[page] is PageState.CACHED for page in shared
            )
            num_own = min(max(num_held + count - self.quotas[owner], 0), num_cached)
        num_free = before.count(PageState.FREE) + num_own
        evicted = self.follow_events()
        assert len(evicted) == num_own + max(0, count - num_free)
        assert all(salt == owner for salt, _ in evicted[:num_own]), "another's pages went first"
        for prefix in evicted:
            page_id = self.oracle.tree.pop(prefix)
            self.oracle.ready.remove(prefix)
            assert before[page_id] is PageState.CACHED
            assert page_id not in shared
            self.check_leaf(prefix)
        for page_id in fresh:
            assert before[page_id] in {PageState.FREE, PageState.CACHED}
            self.oracle.generations[page_id] += 1
            self.oracle.owners[page_id] = owner

    def take_trimmed(self, owner: bytes) -> None:
        """Check the evictions after which a salt has no more cached than its quota."""
        for prefix in self.follow_events():
            assert prefix[0] == owner, "another's page went"
            assert len(self.oracle.held(owner)) > self.quotas[owner], "it went for nothing"
            page_id = self.oracle.tree[prefix]
            assert self.oracle.state(page_id) is PageState.CACHED
            del self.oracle.tree[prefix]
            self.oracle.ready.remove(prefix)
            self.check_leaf(prefix)

    def check_leaf(self, evicted: Prefix) -> None:
        salt, tokens = evicted
        assert not any(
            other[0] == salt and other[1][: len(tokens)] == tokens for other in self.oracle.tree
        ), "a page was evicted before those below it"

    def write(self, seq: ModelSequence, start: int, end: int) -> None:
        for position in range(start, end):
            slot = (seq.page_ids[position // PAGE_SIZE], position % PAGE_SIZE)
            self.oracle.slots[slot] = (seq.salt, tuple(seq.tokens[: position + 1]))
        seq.num_computed = end

    def check_slot(self, page_id: int, salt: bytes, tokens: list[int], position: int) -> None:
        found = self.oracle.slots.get((page_id, position % PAGE_SIZE))
        assert found == (salt, tuple(tokens[: position + 1])), "wrong contents"

    def follow_events(self) -> list[Prefix]:
        """Apply new events; returns the prefixes that were removed, in order."""
        for seq in self.oracle.sequences:
            self.name_pages(seq.tokens, seq.salt)
        removed = []
        for event in self.cache.drain_events():
            if isinstance(event, Stored):
                assert event.page_hash not in self.stored
                self.stored.add(event.page_hash)
            else:
                self.stored.remove(event.page_hash)
                removed.append(self.names[event.page_hash])
        return removed

    def name_pages(self, tokens: list[int], salt: bytes) -> None:
        hashes = page_hashes(pack_token_ids(tokens), PAGE_SIZE, fingerprint=FINGERPRINT, salt=salt)
        for num_pages, page_hash in enumerate(hashes, start=1):
            self.names[page_hash] = (salt, tuple(tokens[: num_pages * PAGE_SIZE]))


class QuotaMachine(CacheMachine):
    """Both salts have quotas, which together leave some of the pool to nobody."""

    quotas: ClassVar[dict[bytes, int]] = {b"": 5, b"tenant": 3}


class ExpectNoEffect:
    """Expect OutOfPages, and that nothing has changed by it."""

    def __init__(self, machine: CacheMachine, needed: int) -> None:
        self.machine = machine
        self.needed = needed

    def __enter__(self) -> None:
        self.before = self.machine.everything()

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        assert isinstance(error, OutOfPages), f"expected OutOfPages, found {error!r}"
        assert error.needed == self.needed
        assert self.machine.everything() == self.before
        assert not self.machine.cache.drain_events()
        return True
