"""Maps each page hash to the workers that hold the page, fed by the workers' cache events.

Confirmed entries follow the events of each worker exactly. Speculative entries stand for pages that
a routed request is about to create; they bridge the time until the event comes, and expire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kv_cache.page_hash import HASH_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheBatch:
    """Changes of one worker's cache. Sequence numbers of an incarnation are contiguous."""

    incarnation: int
    sequence: int  # after this batch
    is_snapshot: bool  # `stored` is the whole cache
    stored: bytes  # page hashes, concatenated
    removed: bytes


@dataclass(frozen=True, slots=True)
class Position:
    """The last of a worker's events that was applied."""

    incarnation: int
    sequence: int


class PrefixIndex:
    """The index of one router.

    Invariants: at most `max_pages` confirmed and as many speculative hashes are held; each
    confirmed bit belongs to a worker with a position, and equals that worker's cache at it (but
    for pages that did not fit). Each expectation is in one entry of the heap, however often it is
    renewed, and that entry is due no later than it expires.
    """

    def __init__(self, *, max_pages: int) -> None:
        self._max_pages = max_pages
        self._bits: dict[str, int] = {}  # worker_id |-> its bit, 1 << k; reused after removal
        self._masks: dict[bytes, int] = {}  # page hash |-> bits of the workers that hold it
        self._pages: dict[str, set[bytes]] = {}  # worker_id |-> its hashes
        self._positions: dict[str, Position] = {}
        self._expected: dict[bytes, dict[int, float]] = {}  # page hash |-> (bit |-> expires_at)
        # Heap: when to look again, bit, page hashes
        self._expiries: list[tuple[float, int, tuple[bytes, ...]]] = []

    @property
    def num_pages(self) -> int:
        """Number of confirmed page hashes."""
        return len(self._masks)

    def position(self, worker_id: str) -> Position | None:
        """Return how far a worker's events were applied; None asks for a snapshot."""
        return self._positions.get(worker_id)

    def apply(self, worker_id: str, batch: CacheBatch) -> bool:
        """Apply a batch; False means a gap: nothing was changed, ask for a snapshot."""
        position = self._positions.get(worker_id)
        if batch.is_snapshot:
            self.forget(worker_id)
        elif position is None or position.incarnation != batch.incarnation:
            return False
        elif batch.sequence <= position.sequence:
            return True  # delivered twice
        elif batch.sequence != position.sequence + 1:
            return False
        bit = self._bit(worker_id)
        pages = self._pages.setdefault(worker_id, set())
        for page_hash in _split(batch.removed):
            if page_hash in pages:
                pages.discard(page_hash)
                self._clear(page_hash, bit)
        for page_hash in _split(batch.stored):
            # When full, the earliest entries stay: the beginnings that many prompts share.
            if page_hash in self._masks or len(self._masks) < self._max_pages:
                self._masks[page_hash] = self._masks.get(page_hash, 0) | bit
                pages.add(page_hash)
        self._positions[worker_id] = Position(batch.incarnation, batch.sequence)
        return True

    def expect(self, worker_id: str, page_hashes: Sequence[bytes], expires_at: float) -> None:
        """Count pages as held by a worker until a time, because a request was sent there.

        Pages that it holds are left alone: its events say when it drops them.
        """
        bit = self._bit(worker_id)
        entered = []
        for page_hash in page_hashes:
            if self._masks.get(page_hash, 0) & bit:
                continue
            if page_hash not in self._expected and len(self._expected) >= self._max_pages:
                break
            expiries = self._expected.setdefault(page_hash, {})
            if bit not in expiries:
                entered.append(page_hash)
            expiries[bit] = max(expires_at, expiries.get(bit, expires_at))
        if entered:
            heappush(self._expiries, (expires_at, bit, tuple(entered)))

    @property
    def expects_pages(self) -> bool:
        """Whether some pages are expected, so that `match` may find more than workers hold."""
        return bool(self._expected)

    def match(self, page_hashes: Sequence[bytes], now: float) -> Mapping[str, int]:
        """Return for each worker how many leading pages it holds, if any."""
        self._expire(now)
        overlaps: dict[str, int] = {}
        if not self._expected:
            mask = self._mask_of_all(page_hashes)
            if mask is not None:
                self._note(overlaps, mask, len(page_hashes))
                return overlaps
        remaining = -1  # all bits
        depth = 0
        for page_hash in page_hashes:
            mask = self._masks.get(page_hash, 0)
            for bit in self._expected.get(page_hash, ()):
                mask |= bit
            kept = remaining & mask
            if kept != remaining and depth:
                self._note(overlaps, remaining & ~mask, depth)
            remaining = kept
            if not remaining:
                return overlaps
            depth += 1
        if depth:
            self._note(overlaps, remaining, depth)
        return overlaps

    def holders(self, page_hash: bytes) -> list[str]:
        """Return the workers that hold a page for certain, by name."""
        mask = self._masks.get(page_hash, 0)
        return sorted(worker_id for worker_id, bit in self._bits.items() if mask & bit)

    def forget(self, worker_id: str) -> None:
        """Drop a worker's confirmed entries; its next batch must be a snapshot."""
        self._positions.pop(worker_id, None)
        pages = self._pages.pop(worker_id, None)
        if pages:
            bit = self._bits[worker_id]
            for page_hash in pages:
                self._clear(page_hash, bit)

    def remove_worker(self, worker_id: str) -> None:
        """Forget everything about a worker."""
        self.forget(worker_id)
        bit = self._bits.pop(worker_id, 0)
        for page_hash in [h for h, expiries in self._expected.items() if bit in expiries]:
            self._drop_expected(page_hash, bit)
        self._expiries = [each for each in self._expiries if each[1] != bit]
        heapify(self._expiries)

    def check_integrity(self) -> None:
        """Assert that both directions of the index agree and the bounds hold."""
        masks: dict[bytes, int] = {}
        for worker_id, pages in self._pages.items():
            for page_hash in pages:
                masks[page_hash] = masks.get(page_hash, 0) | self._bits[worker_id]
        assert masks == self._masks, "pages per worker and workers per page differ"
        assert len(self._masks) <= self._max_pages
        assert len(self._expected) <= self._max_pages
        bits = list(self._bits.values())
        assert len(set(bits)) == len(bits), "two workers share a bit"
        assert all(expiries for expiries in self._expected.values())
        entered = {(h, bit): at for at, bit, hashes in self._expiries for h in hashes}
        expected = {(h, bit): at for h, each in self._expected.items() for bit, at in each.items()}
        assert sum(len(hashes) for _, _, hashes in self._expiries) == len(expected)
        assert entered.keys() == expected.keys(), "expectations and the heap differ"
        assert all(entered[each] <= expected[each] for each in expected)

    def _bit(self, worker_id: str) -> int:
        bit = self._bits.get(worker_id)
        if bit is None:
            used = sum(self._bits.values())
            bit = ~used & (used + 1)  # the lowest that is free
            self._bits[worker_id] = bit
        return bit

    def _mask_of_all(self, page_hashes: Sequence[bytes]) -> int | None:
        """Return the workers that certainly hold each page, if these are the same for all."""
        masks = set(map(self._masks.get, page_hashes))
        return masks.pop() if len(masks) == 1 else None

    def _clear(self, page_hash: bytes, bit: int) -> None:
        mask = self._masks[page_hash] & ~bit
        if mask:
            self._masks[page_hash] = mask
        else:
            del self._masks[page_hash]

    def _note(self, overlaps: dict[str, int], mask: int, depth: int) -> None:
        for worker_id, bit in self._bits.items():
            if mask & bit:
                overlaps[worker_id] = depth

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, bit, page_hashes = heappop(self._expiries)
            renewed: dict[float, list[bytes]] = {}
            for page_hash in page_hashes:
                expires_at = self._expected[page_hash][bit]
                if expires_at <= now:
                    self._drop_expected(page_hash, bit)
                else:
                    renewed.setdefault(expires_at, []).append(page_hash)
            for expires_at, kept in renewed.items():
                heappush(self._expiries, (expires_at, bit, tuple(kept)))

    def _drop_expected(self, page_hash: bytes, bit: int) -> None:
        expiries = self._expected[page_hash]
        del expiries[bit]
        if not expiries:
            del self._expected[page_hash]


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
