"""What attention of drawn tokens reads, counted from plans on the host.

A row is a drawn token; it needs all K and V that it attends to. Flat attention reads them for each
row again; cascade attention reads a run of tokens once for all rows that share it. Prompt tokens do
not count: their attention computes for longer than it reads. Nor does what a kernel loads again
from the cache of a device, as the tiles of a shared run do.
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class KVReads:
    """Reads in all layers of one step, or summed over steps. read_bytes <= needed_bytes."""

    needed_bytes: int = 0  # K and V of all rows, counted for each row
    read_bytes: int = 0  # the same, but what rows share counts once
    groups: int = 0  # of rows that share from their first token on
    grouped_rows: int = 0  # rows in these groups

    def __add__(self, other: Self) -> "KVReads":
        return KVReads(
            needed_bytes=self.needed_bytes + other.needed_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            groups=self.groups + other.groups,
            grouped_rows=self.grouped_rows + other.grouped_rows,
        )


NO_READS = KVReads()


def flat_reads(num_tokens: int, token_bytes: int) -> KVReads:
    """Return the reads of rows that share nothing.

    Args:
        num_tokens: The tokens that rows attend to, summed over rows.
        token_bytes: K and V of a token in all layers.
    """
    num_bytes = num_tokens * token_bytes
    return KVReads(needed_bytes=num_bytes, read_bytes=num_bytes)
