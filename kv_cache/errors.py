"""Exceptions of kv_cache.

CacheError
├── OutOfPages        not enough pages are free or evictable; nothing was changed
├── PageStateError    the state of a page does not allow the operation, as in a double free;
│                     nothing was changed
└── SequenceEnded     the sequence was released or aborted before
"""


class CacheError(Exception):
    """Base of all exceptions of the page pool and the prefix cache."""


class OutOfPages(CacheError):
    """Fewer pages are free or evictable than are needed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} pages needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class PageStateError(CacheError):
    """The state of a page does not allow the operation."""


class SequenceEnded(CacheError):
    """A sequence was used after it had been released or aborted."""
