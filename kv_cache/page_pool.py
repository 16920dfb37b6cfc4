"""The holders of each page of one pool: accounting only, no contents.

The state of a page follows from its holders; the first line that applies counts:

    INCOMING     a transfer in progress may write it
    QUARANTINE   a failed transfer may still write it
    LIVE         a sequence references it
    LEASED       only leases hold it: a receiver has not acknowledged it yet
    CACHED       only the radix tree holds it; may be evicted
    FREE         no holder

    allocate            FREE -> LIVE, or FREE -> INCOMING
    accept              INCOMING -> LIVE            contents were verified
    quarantine          INCOMING -> QUARANTINE      -> release_quarantine -> FREE
    dereference         LIVE -> LEASED, CACHED or FREE
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kv_cache.errors import OutOfPages, PageStateError


class PageState(Enum):
    """See the module docstring."""

    FREE = "free"
    LIVE = "live"
    CACHED = "cached"
    LEASED = "leased"
    INCOMING = "incoming"
    QUARANTINE = "quarantine"

    # Enum's __hash__ hashes the name in Python, which took half of the time of `_settle`.
    __hash__ = object.__hash__


# States in which contents are final for every holder of the page.
READABLE = frozenset({PageState.LIVE, PageState.CACHED, PageState.LEASED})
_CACHED, _ONLY_LIVE = PageState.CACHED, frozenset({PageState.LIVE})  # quicker to read than Enum's


@dataclass(frozen=True, kw_only=True, slots=True)
class PageCounts:
    """Pages of a pool by state; the six sum to `total`."""

    total: int
    free: int
    live: int
    cached: int
    leased: int
    incoming: int
    quarantine: int


class Quarantined(NamedTuple):
    """A page in QUARANTINE, in its last owner's generation."""

    page_id: int
    generation: int


class PagePool:
    """Page states, reference counts and generations.

    Invariants: the states partition the pool; the owners partition the pages that are not FREE; the
    free list holds exactly the FREE pages; only FREE pages are handed out. Operations on several
    pages check all of them first: when one raises, nothing has changed. A call names each page at
    most once.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}, must be at least 1")
        self._free = list(reversed(range(num_pages)))
        self._states = [PageState.FREE] * num_pages
        self._references = [0] * num_pages  # by sequences
        self._leases = [0] * num_pages
        self._is_in_tree = [False] * num_pages
        self._transfer: list[PageState | None] = [None] * num_pages  # INCOMING or QUARANTINE
        self._generations = [0] * num_pages
        self._owners = [b""] * num_pages  # the last owner that each was allocated for
        self._held: dict[bytes, int] = {}  # owner |-> its pages that are not FREE, 1 or more
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = num_pages

    @property
    def num_pages(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return self._counts[PageState.FREE] + self._counts[PageState.CACHED]

    def state(self, page_id: int) -> PageState:
        return self._states[page_id]

    def are_live(self, page_ids: Sequence[int]) -> bool:
        """Return whether all pages are LIVE."""
        return set(map(self._states.__getitem__, page_ids)) <= _ONLY_LIVE

    def generation(self, page_id: int) -> int:
        """Return how often the page was allocated; distinguishes successive owners of one page."""
        return self._generations[page_id]

    def num_held(self, owner: bytes) -> int:
        """Return how many pages were allocated for an owner and are not FREE again yet."""
        return self._held.get(owner, 0)

    def num_references(self, page_id: int) -> int:
        return self._references[page_id]

    def num_leases(self, page_id: int) -> int:
        return self._leases[page_id]

    def counts(self) -> PageCounts:
        return PageCounts(
            total=self.num_pages, **{state.value: n for state, n in self._counts.items()}
        )

    def allocate(self, num_pages: int, *, incoming: bool = False, owner: bytes = b"") -> list[int]:
        """Hand out free pages, each with one reference and a new generation.

        Args:
            num_pages: How many.
            incoming: Whether they become INCOMING; otherwise LIVE.
            owner: The owner that they count for until they are FREE again, whatever holds them.

        Raises:
            OutOfPages: Fewer are free; nothing has changed.
        """
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free))
        page_ids = [self._free.pop() for _ in range(num_pages)]
        transfer = PageState.INCOMING if incoming else None
        state = transfer or PageState.LIVE
        for page_id in page_ids:
            self._generations[page_id] += 1
            self._references[page_id] = 1
            self._owners[page_id] = owner
            self._transfer[page_id] = transfer
            self._states[page_id] = state  # what _settle does, of a FREE page
        self._counts[PageState.FREE] -= num_pages
        self._counts[state] += num_pages
        if page_ids:
            self._held[owner] = self.num_held(owner) + len(page_ids)
        return page_ids

    def reference(self, page_ids: Sequence[int]) -> None:
        """Add a reference to pages with final contents."""
        self._require(page_ids, READABLE)
        references, states, live = self._references, self._states, PageState.LIVE
        num_cached = 0
        for page_id in page_ids:
            references[page_id] += 1
            if states[page_id] is _CACHED:  # what _settle does, of most pages
                states[page_id] = live
                num_cached += 1
            elif references[page_id] == 1:
                self._settle(page_id)
        self._counts[_CACHED] -= num_cached
        self._counts[live] += num_cached

    def dereference(self, page_ids: Sequence[int]) -> None:
        """Take one reference away; raises PageStateError on a page without one (double free)."""
        self._require(page_ids, _ONLY_LIVE)
        references, states = self._references, self._states
        leases, is_in_tree = self._leases, self._is_in_tree
        num_cached = 0
        for page_id in page_ids:
            references[page_id] -= 1
            if references[page_id]:
                continue  # it stays LIVE
            if is_in_tree[page_id] and not leases[page_id]:  # what _settle does, of most pages
                states[page_id] = _CACHED
                num_cached += 1
            else:
                self._settle(page_id)
        self._counts[PageState.LIVE] -= num_cached
        self._counts[_CACHED] += num_cached

    def lease(self, page_ids: Sequence[int]) -> None:
        """Pin pages for a receiver."""
        self._require(page_ids, READABLE)
        for page_id in page_ids:
            self._leases[page_id] += 1
            self._settle(page_id)

    def end_lease(self, page_ids: Sequence[int]) -> None:
        """Take one pin away."""
        self._require(page_ids, {PageState.LIVE, PageState.LEASED})
        if not all(self._leases[page_id] for page_id in page_ids):
            raise PageStateError(f"not all of pages {list(page_ids)} are leased")
        for page_id in page_ids:
            self._leases[page_id] -= 1
            self._settle(page_id)

    def enter_tree(self, page_ids: Sequence[int]) -> None:
        """Note that the radix tree holds the pages, which their owner still references."""
        self._require(page_ids, {PageState.LIVE, PageState.INCOMING})
        for page_id in page_ids:
            self._is_in_tree[page_id] = True

    def leave_tree(self, page_id: int) -> None:
        """Note that the radix tree no longer holds the page."""
        if not self._is_in_tree[page_id]:
            raise PageStateError(f"page {page_id} is not in the tree")
        self._is_in_tree[page_id] = False
        self._settle(page_id)

    def accept(self, page_ids: Sequence[int]) -> None:
        """INCOMING -> LIVE: the contents have arrived, or no transfer can write them any more."""
        self._require(page_ids, {PageState.INCOMING})
        for page_id in page_ids:
            self._transfer[page_id] = None
            self._settle(page_id)

    def quarantine(self, page_ids: Sequence[int]) -> tuple[Quarantined, ...]:
        """INCOMING -> QUARANTINE: the owner's reference ends, late writes may still land.

        Returns the argument of `release_quarantine`.
        """
        self._require(page_ids, {PageState.INCOMING})
        if any(self._is_in_tree[page_id] for page_id in page_ids):
            raise PageStateError(f"some of pages {list(page_ids)} are still in the tree")
        for page_id in page_ids:
            self._transfer[page_id] = PageState.QUARANTINE
            self._references[page_id] = 0
            self._settle(page_id)
        return tuple(Quarantined(page_id, self._generations[page_id]) for page_id in page_ids)

    def release_quarantine(self, pages: Sequence[Quarantined]) -> None:
        """QUARANTINE -> FREE: the transport is known to be quiet.

        Quiet means the transport of these pages. A page in quarantine for a later owner, whose
        writes may still land, has another generation and raises PageStateError.
        """
        self._require([page.page_id for page in pages], {PageState.QUARANTINE})
        for page_id, generation in pages:
            if generation != self._generations[page_id]:
                raise PageStateError(
                    f"page {page_id} is in quarantine for a later owner, of generation "
                    f"{self._generations[page_id]}, not {generation}"
                )
        for page_id, _ in pages:
            self._transfer[page_id] = None
            self._settle(page_id)

    def check_integrity(self) -> None:
        """Assert the invariants of the class."""
        for page_id, state in enumerate(self._states):
            assert state is self._derive_state(page_id), f"page {page_id} has a stale state"
            assert self._references[page_id] >= 0, f"page {page_id} has negative references"
            assert self._leases[page_id] >= 0, f"page {page_id} has negative leases"
        free = {p for p, state in enumerate(self._states) if state is PageState.FREE}
        assert len(self._free) == len(free), "a page is in the free list twice"
        assert set(self._free) == free, "the free list is not the set of free pages"
        held = Counter(o for p, o in enumerate(self._owners) if p not in free)
        assert held == self._held, "wrong count of an owner's pages"
        for state, count in self._counts.items():
            assert self._states.count(state) == count, f"wrong count of {state.value} pages"

    def _require(
        self, page_ids: Sequence[int], allowed: set[PageState] | frozenset[PageState]
    ) -> None:
        if len(set(page_ids)) != len(page_ids):
            raise PageStateError(f"a page is named twice in {list(page_ids)}")
        states = self._states
        if set(map(states.__getitem__, page_ids)) <= allowed:
            return
        for page_id in page_ids:
            if states[page_id] not in allowed:
                names = sorted(state.value for state in allowed)
                raise PageStateError(
                    f"page {page_id} is {self._states[page_id].value}, must be one of {names}"
                )

    def _settle(self, page_id: int) -> None:
        """Bring state, counts and free list up to date after a change of the page's holders."""
        before, after = self._states[page_id], self._derive_state(page_id)
        if before is after:
            return
        self._states[page_id] = after
        self._counts[before] -= 1
        self._counts[after] += 1
        if after is PageState.FREE:
            self._free.append(page_id)
            owner = self._owners[page_id]
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]

    def _derive_state(self, page_id: int) -> PageState:
        if (transfer := self._transfer[page_id]) is not None:
            return transfer
        if self._references[page_id]:
            return PageState.LIVE
        if self._leases[page_id]:
            return PageState.LEASED
        return PageState.CACHED if self._is_in_tree[page_id] else PageState.FREE
