"""Publishes the changes of a worker's prefix cache to the routers that follow it."""

import asyncio
from collections.abc import AsyncIterator

from kv_cache.event_log import EventBatch, EventLog
from kv_cache.prefix_cache import PrefixCache


class CacheFeed:
    """An event log that can be followed. Owned by the event loop, as the cache is."""

    def __init__(self, cache: PrefixCache, incarnation: int) -> None:
        self._cache = cache
        self._log = EventLog(incarnation)
        self._changed = asyncio.Event()

    def publish(self) -> None:
        """Append the cache's changes since the last call."""
        events = self._cache.drain_events()
        if events and self._log.append(events) is not None:
            # Each waiter holds the event that it waits for; the next change sets a new one.
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self, incarnation: int, after_sequence: int) -> AsyncIterator[EventBatch]:
        """Yield all batches after a point, or a snapshot; then new batches as they come."""
        while True:
            changed = self._changed
            for batch in self._log.batches_after(incarnation, after_sequence):
                yield batch
                incarnation, after_sequence = batch.incarnation, batch.sequence
            await changed.wait()
