"""The prefix cache of a worker: the pages that a sequence uses, shares, receives and leaves behind.

Life of a sequence:

    match      finds the tree's pages for its tokens; the caller waits until pages that other
               sequences still fill have settled
    reserve    ready pages are referenced, the rest allocated and entered as pending
    hold_twin  the contents of a full last page are in the tree already: copied, not computed
    commit     contents of the first pages are final: other sequences may use them
    extend     room for generated tokens        insert    full generated pages enter the tree
    release    the end, also by preemption      abort     the transfer into its pages failed

        page_ids   [ shared, ready | own, committed | own, pending | private: partial or twin ]
                   0               num_cached_pages
                   0                                num_committed_pages
                   [ ................ in the tree ................. | not in the tree ........ ]

A salt may have a quota. As soon as it has more pages, those that were allocated for it and have no
holder are evicted, least recently used first. A page that a sequence holds is never evicted, so a
salt may exceed its quota for as long as its sequences need that, but then it has no cached pages.

Pure: no clock, no thread. One owner calls it from one event loop, and never ends, forks or inserts
a sequence while an engine step works on its pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_cache.errors import OutOfPages, SequenceEnded
from kv_cache.event_log import CacheEvent, Removed, Stored
from kv_cache.layout import num_pages_for
from kv_cache.page_hash import chained_hashes, root_hash, split_pages
from kv_cache.page_pool import PagePool, PageState, Quarantined
from kv_cache.radix_tree import RadixTree, TreePage


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class PrefixMatch:
    """Full pages of a prompt that the tree holds; at least one token is left to compute.

    `page_tokens` and `path` are for `reserve` alone: they hold while the cache does not change.
    """

    num_ready_pages: int
    num_pending_pages: int  # right after the ready ones: computed or received by other sequences
    last_pending_page: int | None = None  # the id of the last; all have settled when it has
    page_tokens: list[bytes] = field(default_factory=list, compare=False, repr=False)  # all full
    path: list[TreePage] = field(default_factory=list, compare=False, repr=False)


@dataclass(eq=False, kw_only=True, slots=True)
class SequencePages:
    """The pages of one sequence. Callers read the public fields; only the cache writes them."""

    page_ids: list[int]  # in token order; empty after the end
    num_cached_pages: int  # ready when reserved
    num_committed_pages: int  # contents final; pages made by extend count once inserted
    salt: bytes
    num_tree_pages: int  # this many first pages are a path of the tree, the rest is private
    twin_page_id: int | None = None  # ready page of the tree, equal to the last one; see hold_twin
    is_open: bool = True

    @property
    def twin_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies (source page, target page) to make before the last token."""
        return () if self.twin_page_id is None else ((self.twin_page_id, self.page_ids[-1]),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A pin on pages that outlives their sequence."""

    lease_id: int
    page_ids: tuple[int, ...]


class PrefixCache:
    """Page pool and radix tree of one worker, kept consistent.

    Invariants: a holder of a tree page holds all pages before it, so that CACHED pages can always
    be evicted and an allocation can get exactly free + cached pages. Ready pages never follow
    pending ones. An operation that raises OutOfPages has changed nothing. A salt over its quota has
    no CACHED pages.

    Attributes:
        num_over_quota: Pages evicted for a quota so far.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, fingerprint: str, hash_key: bytes = b""
    ) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree()
        self.page_size = page_size
        self._fingerprint = fingerprint
        self._hash_key = hash_key
        self._events: list[CacheEvent] = []
        self._settled: list[int] = []
        self.num_over_quota = 0
        self._quotas: dict[bytes, int] = {}  # salt |-> pages
        self._leases: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # lease_id |-> salt, pages
        self._num_leases = 0  # ever made

    def limit(self, salt: bytes, share: float) -> None:
        """Bound the pages that a salt may keep, from now on.

        Args:
            salt: The salt.
            share: Its part of the pool's pages, above 0, at least one page; 1 or more: no bound.
        """
        if share >= 1:
            self._quotas.pop(salt, None)
            return
        exact = share * self.pool.num_pages
        self._quotas[salt] = max(1, int(exact + 1e-6))  # 0.3 of 10 pages are 3
        self._keep_quota(salt)

    def match(self, token_ids: Sequence[int], salt: bytes = b"") -> PrefixMatch:
        """Look up a prompt; marks the pages that it finds as used and changes nothing else."""
        page_tokens = split_pages(token_ids, self.page_size)
        path = self._match_path(page_tokens, len(token_ids), salt)
        num_ready = len(path)
        while num_ready and not path[num_ready - 1].is_ready:  # ready ones never follow others
            num_ready -= 1
        has_pending = num_ready < len(path)
        return PrefixMatch(
            num_ready_pages=num_ready,
            num_pending_pages=len(path) - num_ready,
            last_pending_page=path[-1].page_id if has_pending else None,
            page_tokens=page_tokens,
            path=path,
        )

    def reserve(
        self,
        token_ids: Sequence[int],
        salt: bytes = b"",
        *,
        incoming: bool,
        match: PrefixMatch | None = None,
    ) -> SequencePages:
        """Begin a sequence: share its ready pages, allocate all others, enter full ones as pending.

        Args:
            incoming: New pages become INCOMING: a transfer may write them; otherwise LIVE.
            match: What `match` has just returned for the same prompt, if it was called.

        Raises:
            OutOfPages: Fewer pages are free or evictable than are needed.
        """
        assert token_ids, "a sequence has at least one token"
        if match is None:
            match = self.match(token_ids, salt)
        assert match.last_pending_page is None, "pending pages must be waited for"
        shared = [page.page_id for page in match.path]
        num_new = num_pages_for(len(token_ids), self.page_size) - len(shared)
        seq = SequencePages(
            page_ids=shared + self._acquire(salt, shared, num_new, incoming=incoming),
            num_cached_pages=len(shared),
            num_committed_pages=len(shared),
            salt=salt,
            num_tree_pages=len(shared),
        )
        new = match.page_tokens[len(shared) :]
        # A full last page may have a twin in the tree, beyond what match may find.
        if new and self.tree.child(self._last_tree_page(seq), new[0], salt) is None:
            self._enter_next(seq, new, is_ready=False)
        return seq

    def hold_twin(self, seq: SequencePages, token_ids: Sequence[int]) -> bool:
        """If all pages of a sequence just reserved are cached, pin the last one's twin.

        A sequence shares no page that it will write, and it must compute the last token for the
        logits of the next. So the caller makes `twin_copies` and then computes one token instead of
        a page. The pin ends when all pages are committed, or with the sequence.
        """
        self._check_open(seq)
        num_full, num_rest = divmod(len(token_ids), self.page_size)
        if num_rest or seq.num_committed_pages != num_full - 1:
            return False
        last_page = split_pages(token_ids[-self.page_size :], self.page_size)[0]
        twin = self.tree.child(self._last_tree_page(seq), last_page, seq.salt)
        if twin is None or not twin.is_ready:
            return False
        self.pool.lease([twin.page_id])
        self.tree.touch(twin)
        seq.twin_page_id = twin.page_id
        return True

    def commit(self, seq: SequencePages, num_pages: int) -> None:
        """Declare the first `num_pages` pages final; fewer than before is a no-op."""
        self._check_open(seq)
        assert num_pages <= len(seq.page_ids), "more pages than the sequence has"
        final = seq.page_ids[seq.num_committed_pages : num_pages]
        self.pool.accept([each for each in final if self.pool.state(each) is PageState.INCOMING])
        for page_id in final:
            page = self.tree.lookup(page_id)
            if page is not None and not page.is_ready:
                page.is_ready = True
                self._settled.append(page_id)
                self._events.append(Stored(page.page_hash))
        seq.num_committed_pages = max(seq.num_committed_pages, num_pages)
        if seq.num_committed_pages == len(seq.page_ids):
            self._leave_twin(seq)

    def extend(self, seq: SequencePages, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in total; raises OutOfPages as reserve does."""
        self._check_open(seq)
        num_new = num_pages_for(num_tokens, self.page_size) - len(seq.page_ids)
        if num_new > 0:
            seq.page_ids += self._acquire(seq.salt, [], num_new)

    def insert(self, seq: SequencePages, token_ids: Sequence[int]) -> None:
        """Enter all full pages of `token_ids`, which the sequence has computed, into the tree.

        Where the tree has an equal ready page, the sequence switches to it and drops its own, so
        `page_ids` may change. From the first page on that has another holder, or whose equal page
        in the tree is pending, pages stay private until a later call.
        """
        self._check_open(seq)
        num_pages = len(token_ids) // self.page_size
        assert self.pool.are_live(seq.page_ids[:num_pages]), "a page that was not verified"
        self.commit(seq, num_pages)
        for tokens in split_pages(token_ids[seq.num_tree_pages * self.page_size :], self.page_size):
            own = seq.page_ids[seq.num_tree_pages]
            twin = self.tree.child(self._last_tree_page(seq), tokens, seq.salt)
            if twin is not None and twin.is_ready:
                self.pool.reference([twin.page_id])
                seq.page_ids[seq.num_tree_pages] = twin.page_id
                seq.num_tree_pages += 1
                self.pool.dereference([own])
            elif twin is None and not self._is_shared(own):
                self._enter_next(seq, [tokens], is_ready=True)
            else:
                break
        self._touch(seq)

    def fork(
        self, seq: SequencePages, num_tokens: int
    ) -> tuple[SequencePages, tuple[tuple[int, int], ...]]:
        """Begin a second sequence over the first `num_tokens` tokens, which are computed.

        Returns:
            The new sequence, which shares full pages and has a separate page for a partial last
            one, and the copies (source page, target page) that the caller must make before use.

        Raises:
            OutOfPages: No page is free or evictable for the partial page.
        """
        self._check_open(seq)
        num_full, num_rest = divmod(num_tokens, self.page_size)
        assert num_pages_for(num_tokens, self.page_size) <= len(seq.page_ids), "too many tokens"
        read = seq.page_ids[: num_pages_for(num_tokens, self.page_size)]
        assert not any(map(self._is_pending, read)), "pages that are not computed yet"
        shared = read[:num_full]
        own = self._acquire(seq.salt, shared, 1 if num_rest else 0)
        forked = SequencePages(
            page_ids=shared + own,
            num_cached_pages=num_full,
            num_committed_pages=num_full,
            salt=seq.salt,
            num_tree_pages=min(seq.num_tree_pages, num_full),
        )
        return forked, tuple((seq.page_ids[num_full], page_id) for page_id in own)

    def release(self, seq: SequencePages) -> None:
        """End a sequence: tree pages become CACHED, private ones and own pending ones FREE."""
        self._check_open(seq)
        assert self.pool.are_live(seq.page_ids), "abort ends a sequence that receives"
        self._withdraw_pending(seq)
        self._end(seq, seq.page_ids)

    def abort(self, seq: SequencePages, *, quarantine: bool) -> tuple[Quarantined, ...]:
        """End a sequence whose transfer failed; committed pages stay in the tree.

        Args:
            quarantine: Whether late writes may still land in the pages that were not committed.

        Returns:
            The pages in QUARANTINE, for `release_quarantine` once the transport is quiet.
        """
        self._check_open(seq)
        self._withdraw_pending(seq)
        incoming = [p for p in seq.page_ids if self.pool.state(p) is PageState.INCOMING]
        if not quarantine:
            self.pool.accept(incoming)
            self._end(seq, seq.page_ids)
            return ()
        quarantined = self.pool.quarantine(incoming)
        self._end(seq, [p for p in seq.page_ids if self.pool.state(p) is PageState.LIVE])
        return quarantined

    def release_quarantine(self, pages: Sequence[Quarantined]) -> None:
        """Free pages that no transfer can write any more."""
        self.pool.release_quarantine(pages)

    def lease(self, seq: SequencePages, num_pages: int) -> Lease:
        """Pin the first `num_pages` pages of a sequence beyond its life.

        The first ones, because a tree page is of no use without its prefix.
        """
        self._check_open(seq)
        assert 0 <= num_pages <= len(seq.page_ids), "pages that the sequence does not have"
        pinned = tuple(seq.page_ids[:num_pages])
        self.pool.lease(pinned)
        self._num_leases += 1
        self._leases[self._num_leases] = seq.salt, pinned
        return Lease(lease_id=self._num_leases, page_ids=pinned)

    def release_lease(self, lease: Lease) -> None:
        """End a lease; ending it again is a no-op."""
        salt, pinned = self._leases.pop(lease.lease_id, (b"", ()))
        self.pool.end_lease(pinned)
        for page_id in pinned:
            self.tree.offer(page_id)
        self._keep_quota(salt)

    def drain_events(self) -> list[CacheEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def drain_settled(self) -> list[int]:
        """Return the pending pages that have become ready or left the tree since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def snapshot(self) -> list[bytes]:
        """Return the hashes of all ready pages, sorted."""
        return sorted(page.page_hash for page in self.tree if page.is_ready)

    def check_integrity(self) -> None:
        """Assert the invariants of cache, pool and tree."""
        self.pool.check_integrity()
        self.tree.check_integrity(self._is_evictable)
        for page in self.tree:
            above = self.tree.above(page)
            if above is not None and not self._is_evictable(page.page_id):
                assert not self._is_evictable(above.page_id), "a page is held, its prefix is not"
            assert page.is_ready or not self._is_evictable(page.page_id), "an orphaned pending page"
        for salt, quota in self._quotas.items():
            if self.pool.num_held(salt) > quota:
                own = [page for page in self.tree if page.node.salt == salt]
                assert not any(self._is_evictable(page.page_id) for page in own), "over quota"
        num_cached = self.pool.counts().cached
        assert num_cached == sum(self._is_evictable(page.page_id) for page in self.tree)

    def _match_path(
        self, page_tokens: Sequence[bytes], num_tokens: int, salt: bytes
    ) -> list[TreePage]:
        # One token is left out: its forward pass gives the logits of the next.
        return self.tree.match(page_tokens[: max(num_tokens - 1, 0) // self.page_size], salt)

    def _acquire(
        self, salt: bytes, shared: Sequence[int], num_new: int, *, incoming: bool = False
    ) -> list[int]:
        """Reference `shared` and allocate `num_new` pages, evicting where needed."""
        if num_new > self.pool.num_free:
            available = self.pool.num_available - sum(map(self._is_evictable, shared))
            if num_new > available:
                raise OutOfPages(num_new, available)
        self.pool.reference(shared)
        self._keep_quota(salt, num_new)  # first: an excess must not evict pages of other salts
        self._evict(num_new - self.pool.num_free)
        return self.pool.allocate(num_new, incoming=incoming, owner=salt)

    def _keep_quota(self, salt: bytes, num_new: int = 0) -> None:
        """Evict a salt's cached pages beyond its quota, as if it had `num_new` more pages."""
        quota = self._quotas.get(salt)
        if quota is not None:
            num_over = self.pool.num_held(salt) + num_new - quota
            self.num_over_quota += self._evict(num_over, salt)

    def _evict(self, num_pages: int, salt: bytes | None = None) -> int:
        """Free up to `num_pages` cached pages, of one salt or of all; return how many."""
        evicted = self.tree.evict(num_pages, self._is_evictable, salt=salt)
        for page in evicted:
            self.pool.leave_tree(page.page_id)
            self._events.append(Removed(page.page_hash))
        return len(evicted)

    def _enter_next(
        self, seq: SequencePages, page_tokens: Sequence[bytes], *, is_ready: bool
    ) -> None:
        """Enter the sequence's first private pages into the tree; it has none equal to the first.

        All at once: one by one, 512 pages of a new prompt take several times as long.
        """
        parent = self._last_tree_page(seq)
        first, end = seq.num_tree_pages, seq.num_tree_pages + len(page_tokens)
        page_ids = seq.page_ids[first:end]
        if parent is None:
            parent_hash = root_hash(self._fingerprint, seq.salt, self._hash_key)
        else:
            parent_hash = parent.page_hash
        page_hashes = chained_hashes(parent_hash, page_tokens, self._hash_key)
        self.tree.insert(
            parent,
            page_ids=page_ids,
            page_tokens=page_tokens,
            page_hashes=page_hashes,
            is_ready=is_ready,
            salt=seq.salt,
        )
        self.pool.enter_tree(page_ids)
        seq.num_tree_pages = end
        if is_ready:
            self._events += map(Stored, page_hashes)

    def _withdraw_pending(self, seq: SequencePages) -> None:
        """Take the sequence's own uncommitted pages out of the tree, last first."""
        while seq.num_tree_pages > seq.num_committed_pages:
            page = self._last_tree_page(seq)
            assert page is not None, "a tree page that the tree does not know"
            assert not page.is_ready, "a committed page cannot be withdrawn"
            self.tree.remove(page)
            self.pool.leave_tree(page.page_id)
            self._settled.append(page.page_id)
            seq.num_tree_pages -= 1

    def _end(self, seq: SequencePages, page_ids: Sequence[int]) -> None:
        self._touch(seq)
        self._leave_twin(seq)
        self.pool.dereference(page_ids)
        if seq.num_tree_pages:  # of its path, only the last page may have none below it
            self.tree.offer(seq.page_ids[seq.num_tree_pages - 1])
        seq.page_ids = []
        seq.num_tree_pages = 0
        seq.is_open = False
        self._keep_quota(seq.salt)

    def _leave_twin(self, seq: SequencePages) -> None:
        if seq.twin_page_id is not None:
            self.pool.end_lease([seq.twin_page_id])
            self.tree.offer(seq.twin_page_id)
            seq.twin_page_id = None
            self._keep_quota(seq.salt)

    def _touch(self, seq: SequencePages) -> None:
        page = self._last_tree_page(seq)
        if page is not None:
            self.tree.touch(page)

    def _last_tree_page(self, seq: SequencePages) -> TreePage | None:
        if not seq.num_tree_pages:
            return None
        return self.tree.lookup(seq.page_ids[seq.num_tree_pages - 1])

    def _is_evictable(self, page_id: int) -> bool:
        return self.pool.state(page_id) is PageState.CACHED

    def _is_pending(self, page_id: int) -> bool:
        page = self.tree.lookup(page_id)
        is_incoming = self.pool.state(page_id) is PageState.INCOMING
        return is_incoming or (page is not None and not page.is_ready)

    def _is_shared(self, page_id: int) -> bool:
        return self.pool.num_references(page_id) > 1 or self.pool.num_leases(page_id) > 0

    def _check_open(self, seq: SequencePages) -> None:
        if not seq.is_open:
            raise SequenceEnded("the sequence was released or aborted before")
