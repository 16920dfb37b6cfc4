"""Ways in which pages can arrive wrong. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kv_cache.page_storage import PageBytes

BURST_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One kind of damage, to one page of a chunk or to two."""

    kind: str
    places: tuple[int, ...]  # of the damaged pages, in the chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """The pages that an injury works with."""

    right: PageBytes
    wrong: PageBytes  # the same at first; what arrives
    stale: PageBytes  # contents of other pages, [num_pages, page_bytes]
    rng: np.random.Generator


def _flip_bit(chunk: _Chunk, place: int) -> None:
    at = chunk.rng.integers(chunk.wrong.shape[1])
    chunk.wrong[place, at] ^= 1 << int(chunk.rng.integers(8))


def _flip_burst(chunk: _Chunk, place: int) -> None:
    at = chunk.rng.integers(chunk.wrong.shape[1] - BURST_BYTES)
    chunk.wrong[place, at : at + BURST_BYTES] ^= chunk.rng.integers(
        1, 256, BURST_BYTES, dtype=np.uint8
    )


def _end_with(chunk: _Chunk, place: int, tail: PageBytes | int) -> None:
    """Replace the end of a page, from a random byte on."""
    at = int(chunk.rng.integers(chunk.wrong.shape[1]))
    while (chunk.wrong[place] == chunk.right[place]).all():
        chunk.wrong[place, at:] = tail if isinstance(tail, int) else tail[at:]
        at //= 2


def _zero_tail(chunk: _Chunk, place: int) -> None:
    _end_with(chunk, place, 0)


def _truncate(chunk: _Chunk, place: int) -> None:
    _end_with(chunk, place, chunk.stale[place])


def _keep_stale(chunk: _Chunk, place: int) -> None:
    chunk.wrong[place] = chunk.stale[place]


def _take_neighbour(chunk: _Chunk, place: int) -> None:
    chunk.wrong[place] = chunk.right[(place + 1) % len(chunk.right)]


def _shift(chunk: _Chunk, place: int) -> None:
    chunk.wrong[place] = np.roll(chunk.right[place], 4)


def _swap(chunk: _Chunk, place: int, other: int) -> None:
    chunk.wrong[[place, other]] = chunk.right[[other, place]]


KINDS: Mapping[str, tuple[str, int, Callable[..., None]]] = {
    # kind |-> (description, number of damaged pages, function)
    "bit": ("one bit is flipped", 1, _flip_bit),
    "burst": (f"{BURST_BYTES} bytes in a row are other ones", 1, _flip_burst),
    "zero-tail": ("the page ends with zeros", 1, _zero_tail),
    "truncated": ("the page ends with what another one holds", 1, _truncate),
    "stale": ("the page is that of another prompt", 1, _keep_stale),
    "misplaced": ("the page is another one of its prompt", 1, _take_neighbour),
    "shifted": ("the page begins four bytes late", 1, _shift),
    "swapped": ("two pages have changed places", 2, _swap),
}


def damaged(
    right: PageBytes, injuries: Sequence[Damage], *, stale: PageBytes, seed: int
) -> PageBytes:
    """Return the pages that arrive instead of a chunk.

    Args:
        right: The chunk, at least two pages; they differ, and are longer than a burst.
        injuries: The damage; no place comes twice.
        stale: As many pages of another prompt.
        seed: Seed of all randomness.

    Raises:
        ValueError: The damaged pages are not exactly the intended ones.
    """
    chunk = _Chunk(right=right, wrong=right.copy(), stale=stale, rng=np.random.default_rng(seed))
    for each in injuries:
        KINDS[each.kind][2](chunk, *each.places)
    wrong = np.flatnonzero((chunk.wrong != right).any(axis=1)).tolist()
    if wrong != (meant := sorted(place for each in injuries for place in each.places)):
        raise ValueError(f"pages {wrong} of the chunk are wrong, not {meant}")
    return chunk.wrong
