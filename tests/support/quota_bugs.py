"""Bugs of quotas to plant: what tests of caches and of whole clusters must both find."""

from collections.abc import Callable

import pytest

from kv_cache.prefix_cache import PrefixCache
from kv_cache.radix_tree import RadixTree, TreePage

Plant = Callable[[pytest.MonkeyPatch], None]


def quotas_bound_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_keep_quota", lambda self, salt, num_new=0: None)


def who_used_it_longest_ago_goes_first(patch: pytest.MonkeyPatch) -> None:
    """Also where only pages of the tenant that is over its quota may go."""
    original = RadixTree.evict

    def evict(
        self: RadixTree,
        num_pages: int,
        is_evictable: Callable[[int], bool],
        *,
        salt: bytes | None = None,
    ) -> list[TreePage]:
        return original(self, num_pages, is_evictable)

    patch.setattr(RadixTree, "evict", evict)
