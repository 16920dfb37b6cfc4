"""Numbered changes of a prefix cache, for routers that follow it.

A worker appends the cache's events in batches; each batch has the next sequence number. A
subscriber names the last batch that it has applied and gets the later ones. If these are no longer
kept, or it names another incarnation, it gets a snapshot and forgets its earlier state.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Stored:
    """A page became ready in the prefix cache."""

    page_hash: bytes  # 16 bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """A ready page left the prefix cache."""

    page_hash: bytes  # 16 bytes


CacheEvent = Stored | Removed


@dataclass(frozen=True, kw_only=True, slots=True)
class EventBatch:
    """A net change: no hash is both stored and removed."""

    incarnation: int
    sequence: int  # one more than that of the batch before
    is_snapshot: bool  # `stored` is the whole cache; discard earlier state
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class EventLog:
    """The last batches of one incarnation of a worker, and the state after them."""

    def __init__(self, incarnation: int, *, max_hashes: int = 1 << 16) -> None:
        """Keep batches of `max_hashes` hashes in total; subscribers further behind start over."""
        self.incarnation = incarnation
        self._max_hashes = max_hashes
        self._sequence = 0  # of the last batch
        self._batches: deque[EventBatch] = deque()  # contiguous, ends with self._sequence
        self._num_hashes = 0  # in self._batches
        self._current: set[bytes] = set()

    def append(self, events: Iterable[CacheEvent]) -> EventBatch | None:
        """Record events as one batch and return it; None when they cancel out."""
        stored: dict[bytes, None] = {}
        removed: dict[bytes, None] = {}
        for event in events:
            here, there = (stored, removed) if isinstance(event, Stored) else (removed, stored)
            if event.page_hash in there:
                del there[event.page_hash]
            else:
                here[event.page_hash] = None
        if not stored and not removed:
            return None
        self._sequence += 1
        batch = EventBatch(
            incarnation=self.incarnation,
            sequence=self._sequence,
            is_snapshot=False,
            stored=tuple(stored),
            removed=tuple(removed),
        )
        self._current.difference_update(removed)
        self._current.update(stored)
        self._keep(batch)
        return batch

    def batches_after(self, incarnation: int, sequence: int) -> list[EventBatch]:
        """Return the update for a subscriber: later batches, or one snapshot."""
        oldest = self._batches[0].sequence if self._batches else self._sequence + 1
        if incarnation != self.incarnation or not oldest - 1 <= sequence <= self._sequence:
            return [self.snapshot()]
        later = islice(reversed(self._batches), self._sequence - sequence)
        return list(later)[::-1]

    def snapshot(self) -> EventBatch:
        """Return the whole cache as of the last batch."""
        return EventBatch(
            incarnation=self.incarnation,
            sequence=self._sequence,
            is_snapshot=True,
            stored=tuple(sorted(self._current)),
            removed=(),
        )

    def _keep(self, batch: EventBatch) -> None:
        self._batches.append(batch)
        self._num_hashes += len(batch.stored) + len(batch.removed)
        while self._num_hashes > self._max_hashes:
            oldest = self._batches.popleft()
            self._num_hashes -= len(oldest.stored) + len(oldest.removed)
