"""Prefixes that prompts shared, and how often: shown to people, used by no decision."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest


@dataclass(kw_only=True, slots=True)  # not frozen: to make one would take many times as long
class HotPrefix:
    """A prefix that prompts found in a cache."""

    tenant: str  # whose prompts they were
    page_hash: bytes  # of its last page, which stands for all earlier ones
    num_tokens: int
    num_hits: int  # prompts whose longest known prefix it was


class HotPrefixes:
    """Counts the longest known prefix of each prompt, without its contents.

    Invariant: at most `max_prefixes` are held; the least recently used go first.
    """

    def __init__(self, *, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        # (tenant, page hash) |-> prefix, latest last
        self._found: OrderedDict[tuple[str, bytes], HotPrefix] = OrderedDict()

    def add(
        self, tenant: str, page_hashes: Sequence[bytes], *, num_known: int, page_size: int
    ) -> None:
        """Count a prompt.

        Args:
            tenant: Its tenant.
            page_hashes: The page hashes of its full pages.
            num_known: How many of them, from the first on, some worker holds.
            page_size: Tokens of a page.
        """
        if not num_known:
            return
        page_hash = page_hashes[num_known - 1]
        before = self._found.pop((tenant, page_hash), None)
        self._found[tenant, page_hash] = HotPrefix(
            tenant=tenant,
            page_hash=page_hash,
            num_tokens=num_known * page_size,
            num_hits=before.num_hits + 1 if before else 1,
        )
        if len(self._found) > self._max_prefixes:
            self._found.popitem(last=False)

    def hottest(self, count: int, tenant: str | None = None) -> list[HotPrefix]:
        """Return the prefixes with most hits, most first; of equals the longest first.

        Args:
            count: How many at most.
            tenant: The only tenant to consider; None: all.
        """
        found = [each for each in self._found.values() if tenant in (None, each.tenant)]
        return nlargest(count, found, key=lambda each: (each.num_hits, each.num_tokens))
