"""Plants bugs that tests must find; here are those that several tests plant."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

import kv_transfer.receiver_protocol
import kv_transfer.sender_protocol
from kv_cache.prefix_cache import PrefixCache
from kv_cache.radix_tree import RadixTree, TreePage

Plant = Callable[[pytest.MonkeyPatch], None]
Right = Callable[..., Any]  # what a bug replaces


def instead_of(owner: object, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make a function plant itself as an attribute; its first argument is the right function."""

    def decorate(wrong: Callable[..., Any]) -> Plant:
        @wraps(wrong)
        def plant(patch: pytest.MonkeyPatch) -> None:
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))

        return plant

    return decorate


def quotas_bound_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_keep_quota", lambda self, salt, num_new=0: None)


@instead_of(RadixTree, "evict")
def who_used_it_longest_ago_goes_first(
    right: Right,
    self: RadixTree,
    num_pages: int,
    is_evictable: Callable[[int], bool],
    *,
    salt: bytes | None = None,
) -> list[TreePage]:
    """Evict so even where only pages of the tenant over its quota may go."""
    return right(self, num_pages, is_evictable)


@instead_of(kv_transfer.receiver_protocol, "_digested")
def no_digest_check(right: Right, state: Any, chunk: int, digests: Any) -> Any:
    """What arrives is committed without a look."""
    return right(state, chunk, (state.chunks[0].digests,) if state.chunks else digests)
